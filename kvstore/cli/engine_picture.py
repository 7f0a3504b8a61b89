"""The picture of `kvstore engine trace`: time to first token of each request, cold and warm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.picture import picture

COLD_COLOUR, WARM_COLOUR, SIZE_COLOUR = "#c2571a", "#1f5fa8", "#888888"


def draw(
    path: Path, tokens: Sequence[int], cold: Sequence[float], warm: Sequence[float], *, title: str
) -> None:
    """Write the picture.

    Units: tokens of each prompt; seconds.
    Errors: InvalidArgument on a suffix that is none of .png, .svg, .pdf, or without matplotlib.
    """
    with picture(path, title=title) as times:
        places = range(1, len(tokens) + 1)
        times.plot(places, cold, "o-", color=COLD_COLOUR, label="without store")
        times.plot(places, warm, "o-", color=WARM_COLOUR, label="with store")
        times.set_yscale("log")
        times.set_ylabel("time to first token, s")
        times.set_xlabel("request, in the order of the trace")
        times.grid(axis="y", alpha=0.25)
        sizes = times.twinx()
        sizes.bar(places, tokens, width=0.6, color=SIZE_COLOUR, alpha=0.2)
        sizes.set_ylabel("prompt, tokens", color=SIZE_COLOUR)
        times.set_zorder(sizes.get_zorder() + 1)
        times.patch.set_visible(False)
        times.legend(loc="center right")
