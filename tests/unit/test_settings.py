"""Settings: precedence of the layers, origins in every complaint, units, relations, secrets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import SettingsError
from kvstore.quantities import GIB, MIB, parse_bytes, parse_mode, parse_seconds
from kvstore.retention import SHIPPED_CLASSES
from kvstore.settings import Loaded, known_keys, load
from kvstore.types import Tier, TtlMode

HOME = {"XDG_RUNTIME_DIR": "/run/user/1", "XDG_STATE_HOME": "/home/u/state", "HOME": "/home/u"}


def loaded(toml: str = "", tmp_path: Path | None = None, **environ: str) -> Loaded:
    config = None
    if toml:
        assert tmp_path is not None
        config = tmp_path / "kvstore.toml"
        config.write_text(toml)
    return load(environ=HOME | environ, config=config)


def complaint(toml: str, tmp_path: Path, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(toml, tmp_path, **environ)
    return str(caught.value)


def flagged(*flags: tuple[str, object]) -> Loaded:
    return load(environ=HOME, flags=[(f"--set {key}", key, value) for key, value in flags])


def flag_complaint(*flags: tuple[str, object]) -> str:
    with pytest.raises(SettingsError) as caught:
        flagged(*flags)
    return str(caught.value)


def test_nothing_has_to_be_configured() -> None:
    settings = loaded().settings
    assert settings.server.address == "unix:/run/user/1/kvstore/kvstore.sock"
    assert settings.host.arena_bytes == "auto"
    assert settings.ssd.capacity_bytes == "auto"
    assert settings.server.tcp_address == ""
    assert settings.retention_classes() == SHIPPED_CLASSES


def test_each_layer_beats_the_one_below(tmp_path: Path) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text('[ssd]\nsegment_bytes = "8MiB"\nmin_free_bytes = "3GiB"\nwrite_queue_bytes = "5MiB"\n')
    environ = HOME | {"KVSTORE_SSD__MIN_FREE_BYTES": "4GiB", "KVSTORE_SSD__WRITE_QUEUE_BYTES": "6MiB"}
    result = load(
        environ=environ,
        config=config,
        flags=[("--set ssd.write_queue_bytes", "ssd.write_queue_bytes", "7MiB")],
    )
    ssd = result.settings.ssd
    assert (ssd.segment_bytes, ssd.min_free_bytes, ssd.write_queue_bytes) == (8 * MIB, 4 * GIB, 7 * MIB)
    assert result.origins["ssd.segment_bytes"] == f"file {config}"
    assert result.origins["ssd.min_free_bytes"] == "environment KVSTORE_SSD__MIN_FREE_BYTES"
    assert result.origins["ssd.write_queue_bytes"] == "flag --set ssd.write_queue_bytes"
    assert result.origins.get("ssd.enabled", "default") == "default"


def test_a_file_named_by_the_environment_is_read(tmp_path: Path) -> None:
    config = tmp_path / "named.toml"
    config.write_text('[log]\nlevel = "debug"\n')
    assert loaded(KVSTORE_CONFIG=str(config)).settings.log.level == "debug"


def test_the_clients_own_variable_moves_the_socket_too() -> None:
    result = loaded(KVSTORE_ADDRESS="unix:/tmp/a.sock")
    assert result.settings.server.address == "unix:/tmp/a.sock"
    assert result.origins["server.address"] == "environment KVSTORE_ADDRESS"
    assert loaded(KVSTORE_ADDRESS="far:1").settings.server.address.startswith("unix:/run/user/1")


def test_a_shipped_class_is_changed_in_part_and_a_new_one_added(tmp_path: Path) -> None:
    toml = """
        classes.agent.ttl_seconds = "4d"
        [classes.nightly]
        ttl_seconds = "12h"
        mode = "fixed"
        lowest_tier = "host"
    """
    settings = loaded(toml, tmp_path).settings
    assert settings.classes["agent"].ttl_seconds == 4 * 86400
    assert settings.classes["agent"].mode is TtlMode.SLIDING
    added = settings.retention_classes()[-1]
    assert (added.name, added.ttl_seconds, added.mode, added.lowest_tier) == (
        "nightly",
        43200.0,
        TtlMode.FIXED,
        Tier.HOST,
    )


@pytest.mark.parametrize(
    ("toml", "environ", "words"),
    [
        ('[ssd]\npth = "x"', {}, ["kvstore.toml", "'ssd.pth'", "ssd.path"]),
        ("[srv]\na = 1", {}, ["kvstore.toml", "'srv.a'", "nearest valid key"]),
        ('[classes.agent]\nttl = "3d"', {}, ["'classes.agent.ttl'", "classes.agent.ttl_seconds"]),
        ("", {"KVSTORE_SSD__PTH": "x"}, ["environment KVSTORE_SSD__PTH", "KVSTORE_SSD__PATH"]),
        ("", {"KVSTORE_SSD_PATH": "x"}, ["environment KVSTORE_SSD_PATH", "KVSTORE_SSD__PATH"]),
        ("[ssd]\nsegment_bytes = 3", {}, ["ssd.segment_bytes", "kvstore.toml", "4194304", "got 3"]),
        ("", {"KVSTORE_SSD__CAPACITY_BYTES": "12Q"}, ["KVSTORE_SSD__CAPACITY_BYTES", "64GiB", "'12Q'"]),
        ('[classes.agent]\nttl_seconds = "soon"', {}, ["classes.agent.ttl_seconds", "3d", "'soon'"]),
        ('[classes.agent]\nmode = "loose"', {}, ["classes.agent.mode", "'sliding' or 'fixed'"]),
        ('[classes.agent]\nlowest_tier = "shared"', {}, ["lowest_tier", "'host' and 'ssd'"]),
        ('[classes.fresh]\nmode = "fixed"', {}, ["classes.fresh.ttl_seconds", "required"]),
        ('[classes."Big One"]\nttl_seconds = 3', {}, ["Big One"]),
        ("[server]\nsocket_mode = 600", {}, ["server.socket_mode", '"0600"', "got 600"]),
        ('[server]\naddress = "tcp:1"', {}, ["server.address", "^unix:"]),
        ('[ssd]\npath = ""', {}, ["ssd.path", "expected a path"]),
        ('[log]\nlevel = "loud"', {}, ["log.level", "'debug', 'info', 'warning' or 'error'"]),
        ("not toml", {}, ["kvstore.toml", "not TOML"]),
        ("classes = 3", {}, ["'classes'"]),
    ],
)
def test_a_complaint_names_origin_and_remedy(
    toml: str, environ: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    text = complaint(toml, tmp_path, **environ)
    assert all(word in text for word in words), text


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = complaint('[ssd]\nsegment_bytes = 3\nmin_free_bytes = "x"\n', tmp_path)
    assert len(text.splitlines()) == 2


def test_variables_of_an_orchestrator_are_not_settings() -> None:
    loaded(KVSTORE_SERVICE_HOST="10.0.0.1", KVSTORE_PORT="tcp://10.0.0.1:80", KVSTORE_TOKEN="x" * 20)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml \(from --config\): No such file"):
        load(environ=HOME, config=tmp_path / "missing.toml")


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    secret = "s3cret-s3cret-s3cret"
    result = flagged(
        ("server.token", secret), ("server.plaintext_loopback", "true"), ("server.tcp_address", "127.0.0.1:0")
    )
    assert secret not in repr(result.settings)
    assert ("server.token", "***", "flag --set server.token") in result.rows()
    assert secret not in flag_complaint(("server.token", secret), ("ssd.segment_bytes", "1"))
    assert "12345678" not in complaint("[server]\ntoken = 12345678", tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([("server.tcp_address", "10.0.0.1:1")], ["needs a token", "needs TLS"]),
        ([("server.tcp_address", "here")], ["expected host:port"]),
        (
            [
                ("server.tcp_address", "10.0.0.1:1"),
                ("server.token_file", "/t"),
                ("server.plaintext_loopback", "true"),
            ],
            ["10.0.0.1 is no loopback address"],
        ),
        ([("server.tls_cert", "/c")], ["certificate needs its key"]),
        ([("server.tls_client_ca", "/c")], ["server.tls_cert"]),
        ([("server.token", "a"), ("server.token_file", "/t")], ["one of the two"]),
        ([("ssd.capacity_bytes", "8MiB"), ("ssd.segment_bytes", "8MiB")], ["4 segments", "got 8388608"]),
        ([("host.arena_bytes", "4KiB")], ["at least 4194304", "got 4096"]),
        ([("server.metrics_address", "nine")], ["expected host:port"]),
        ([("encryption.enabled", "true")], ["needs keys", "encryption.key_file"]),
        ([("encryption.key_file", "/k"), ("encryption.key_command", "k")], ["one of the two"]),
    ],
)
def test_settings_that_contradict_each_other(flags: list[tuple[str, object]], words: list[str]) -> None:
    text = flag_complaint(*flags)
    assert all(word in text for word in words), text


def test_a_command_is_words_or_a_line() -> None:
    assert flagged(("encryption.key_command", "vault get 'a b'")).settings.encryption.key_command == (
        "vault", "get", "a b",
    )  # fmt: skip
    assert flagged(("encryption.key_command", ["a", "b"])).settings.encryption.key_command == ("a", "b")


def test_what_may_be_set_is_frozen() -> None:
    settings = loaded().settings
    with pytest.raises(ValueError, match="frozen"):
        settings.ssd.enabled = False


def test_every_setting_is_described_and_printed() -> None:
    result = loaded()
    shown = {key for key, _, _ in result.rows()}
    for key in known_keys():
        assert key in shown or key.replace("<name>", "agent") in shown
    for section in (
        type(result.settings.ssd),
        type(result.settings.server),
        type(result.settings.encryption),
        type(result.settings.classes["agent"]),
    ):
        assert all(info.description for info in section.model_fields.values())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 * GIB),
        ("1.5 MiB", 3 << 19),
        ("10kb", 10_000),
        ("7", 7),
        (7, 7),
        ("2g", 2 * GIB),
        (" 1TiB ", 1 << 40),
    ],
)
def test_bytes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800.0), ("3d", 259200.0), ("500ms", 0.5), (2, 2.0), ("forever", math.inf)]
)
def test_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1PiB", "1 2", True, None, [1]])
def test_what_is_no_quantity(text: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="expected"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "mode"), [("0600", 0o600), ("660", 0o660), ("0o640", 0o640)])
def test_modes(text: str, mode: int) -> None:
    assert parse_mode(text) == mode


@given(st.integers(min_value=0, max_value=1 << 50))
def test_any_number_of_bytes_comes_back(size: int) -> None:
    assert parse_bytes(str(size)) == parse_bytes(size) == size
