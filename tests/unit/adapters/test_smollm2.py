"""The converted model appears whole or not at all, once per weights file."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_adapters.transformers import smollm2


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "find_model", lambda _: file)
    return file


def converter(monkeypatch: pytest.MonkeyPatch, result: Exception | None = None) -> list[Path]:
    calls: list[Path] = []

    def convert(_: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(b"converted")
        if result:
            raise result

    monkeypatch.setattr("engine_adapters.transformers.engine.convert_gguf", convert)
    return calls


def test_a_file_is_converted_once(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = converter(monkeypatch), list[str]()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = smollm2.prepare(said.append, environ)
    assert first == smollm2.prepare(said.append, environ)
    assert (first / "model.safetensors").read_bytes() == b"converted"
    assert len(calls) == len(said) == 1
    assert first.parent == tmp_path / "cache" / "kvstore" / "models"
    gguf.write_bytes(b"other weights")
    assert smollm2.prepare(said.append, environ) != first


def test_a_failed_conversion_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(monkeypatch, OSError("disk full"))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare(lambda _: None, environ)
    assert list((tmp_path / "cache" / "kvstore" / "models").iterdir()) == []


def test_the_loser_of_a_race_uses_the_winners_folder(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    winner = smollm2.model_folder(gguf, environ)

    def convert(_: Path, folder: Path) -> None:
        (folder / "mine").touch()
        winner.mkdir(parents=True)
        (winner / "theirs").touch()

    monkeypatch.setattr("engine_adapters.transformers.engine.convert_gguf", convert)
    assert [file.name for file in smollm2.prepare(lambda _: None, environ).iterdir()] == ["theirs"]
    assert list(winner.parent.iterdir()) == [winner]
