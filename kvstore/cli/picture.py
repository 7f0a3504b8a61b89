"""Pictures that a command writes to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument

SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def picture(path: Path, *, title: str) -> Iterator[Any]:
    """Lend matplotlib's axes, and write what was drawn on them.

    Errors: InvalidArgument on a suffix that is none of .png, .svg, .pdf, or without matplotlib.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InvalidArgument("--plot needs matplotlib: pip install 'tiered-kvstore[plan]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    try:
        yield axes
        axes.set_title(title)
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)
