"""What an engine's weights are: a fingerprint of the files that it loads, never their names alone."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import xxhash

from kvstore.errors import InvalidArgument

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""In order of preference, as engines choose; the first that there are count."""
ADAPTER_FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
CHUNK_BYTES = 8 << 20


def weights_fingerprint(model: Path) -> str:
    """Return a fingerprint of a model's weights, given its folder or its only file.

    Errors: InvalidArgument when there is no weights file, saying what to do.
    """
    if model.is_file():
        return _fingerprint([model], b"kvstore vl wts")
    for pattern in WEIGHT_FILES:
        if files := sorted(model.glob(pattern)):
            return _fingerprint(files, b"kvstore vl wts")
    raise InvalidArgument(
        f"vllm adapter: no weights file ({', '.join(WEIGHT_FILES)}) in {model}; name the weights by an "
        'immutable version instead: "kv_connector_extra_config": {"weights": "..."}'
    )


def adapter_fingerprint(folder: Path) -> str:
    """Return a fingerprint of a LoRA adapter's files.

    Errors: InvalidArgument when the folder holds none.
    """
    files = sorted({file for pattern in ADAPTER_FILES for file in folder.glob(pattern)})
    if not files:
        raise InvalidArgument(f"vllm adapter: no adapter file ({', '.join(ADAPTER_FILES)}) in {folder}")
    return _fingerprint(files, b"kvstore vl lora")


def _fingerprint(files: list[Path], person: bytes) -> str:
    names = hashlib.blake2b(digest_size=32, person=person)
    for file in files:
        names.update(f"{file.name}\0{_content(file)}\0".encode())
    return f"files-{names.hexdigest()}"


def _content(file: Path) -> str:
    """Return a digest of a file's content; a hub's cache has it in the name that its links point to."""
    target = file.resolve()
    if target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name):
        return target.name
    state, buffer = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with target.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            state.update(view[:count])
    return state.hexdigest()
