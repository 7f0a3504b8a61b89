"""The daemon's settings: one frozen tree, and the layers it is merged from. Only daemon and CLI read it.

Precedence, weakest first: defaults, TOML file, environment (`KVSTORE_SSD__PATH`), flags and `--set`.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from kvstore.errors import SettingsError
from kvstore.paths import SOCKET_NAME, data_directory, runtime_directory
from kvstore.quantities import GIB, MIB, parse_bytes, parse_mode, parse_port, parse_seconds
from kvstore.retention import SHIPPED_CLASSES, RetentionClass
from kvstore.types import Admission, Tier, TtlMode

SEGMENTS_MIN = 4
"""Segments go whole: with fewer than this, the capacity would be an empty promise."""
_SECRETS = frozenset({"server.token"})
ENVIRONMENT_PREFIX = "KVSTORE_"
CLASS_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def _not_empty(path: Path) -> Path:
    if str(path) in ("", "."):
        raise ValueError("expected a path")
    return path.expanduser()


def _stored_tier(tier: Tier) -> Tier:
    if tier not in (Tier.HOST, Tier.SSD):
        raise ValueError("this daemon keeps blocks in 'host' and 'ssd'")
    return tier


def _words(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


def _auto_or_bytes(value: object) -> object:
    return value if value == "auto" else parse_bytes(value)


StoredTier = Annotated[Tier, AfterValidator(_stored_tier)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
AutoBytes = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
FileMode = Annotated[int, BeforeValidator(parse_mode)]
BytePort = Annotated[str, BeforeValidator(parse_port)]
Command = Annotated[tuple[str, ...], BeforeValidator(_words)]
FilePath = Annotated[Path, AfterValidator(_not_empty)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(_Section):
    """Where the daemon listens, whom it lets in and how much of them it takes."""

    address: str = Field(
        pattern="^unix:.+", description="unix socket of local clients; beside it a plain one, .bytes"
    )
    socket_mode: FileMode = Field(default=0o600, description="file mode of the socket")
    socket_group: str = Field(default="", description="group of the socket; empty: the daemon's own")
    tcp_address: str = Field(default="", description="host:port for remote clients; empty: none")
    byte_port: BytePort = Field(default="next", description="TCP port of payload: a number, next or off")
    token: SecretStr = Field(default=SecretStr(""), description="an administrator's token for remote clients")
    token_file: FilePath | None = Field(default=None, description="file that holds this token")
    tokens_file: FilePath | None = Field(
        default=None, description="TOML file of tokens per tenant; read again on SIGHUP"
    )
    socket_tokens: bool = Field(
        default=False, description="clients of the unix socket need a token too, and may not map the arena"
    )
    token_requests_per_second: int = Field(
        default=20000, ge=0, description="requests of one token a second; 0: no limit"
    )
    tls_cert: FilePath | None = Field(default=None, description="PEM certificate chain of the TCP port")
    tls_key: FilePath | None = Field(default=None, description="PEM key of the TCP port")
    tls_client_ca: FilePath | None = Field(
        default=None, description="PEM authority that client certificates must come from"
    )
    plaintext_loopback: bool = Field(default=False, description="allow TCP without TLS on a loopback address")
    metrics_address: str = Field(default="127.0.0.1:9464", description="Prometheus endpoint; empty: none")
    message_bytes_max: Bytes = Field(default=64 * MIB, ge=4 * MIB, le=64 * MIB, description="largest message")
    sessions_max: int = Field(default=1024, ge=1, le=65535, description="clients at a time")
    session_requests_max: int = Field(default=256, ge=1, description="unfinished requests of one client")
    session_queue_max: int = Field(
        default=4096, ge=16, description="unread answers after which a slow client is cut off"
    )
    session_leases_max: int = Field(default=8192, ge=1, description="leases of one client")
    session_reservations_max: int = Field(default=1024, ge=1, description="puts of one client under way")
    session_arena_percent: int = Field(
        default=75, ge=1, le=100, description="of the arena: what puts of one client may have reserved"
    )
    session_loads_max: int = Field(
        default=16384, ge=1, description="loads from SSD (1 MiB each) that one client may have waiting"
    )
    session_prefetches_max: int = Field(default=256, ge=1, description="prefetches of one client under way")
    streams_max: int = Field(default=64, ge=1, description="framed puts and fetches at a time")
    connection_streams_max: int = Field(
        default=32,
        ge=1,
        description="framed puts and fetches of one token and connection (byte port: host) at a time",
    )
    stream_idle_seconds: Seconds = Field(
        default=30.0, gt=0, le=3600, description="how long a stream waits for a message, or for a reader"
    )
    put_bytes_max: Bytes = Field(
        default=256 * MIB, ge=4 * MIB, description="headers and chunks of framed puts in memory at a time"
    )
    drain_seconds: Seconds = Field(
        default=10.0, ge=0, le=3600, description="how long SIGTERM may write what is queued"
    )


class HostSettings(_Section):
    """The arena: shared memory that local clients map."""

    arena_bytes: AutoBytes = Field(
        default="auto", description="size; auto: from the memory limit and the mount's free space"
    )
    directory: FilePath = Field(default=Path("/dev/shm"), description="a tmpfs or hugetlbfs mount")
    mode: FileMode = Field(default=0o600, description="file mode of the arena")
    group: str = Field(default="", description="group of the arena; empty: the daemon's own")
    eviction: Literal["lru", "s3fifo", "density"] = Field(default="lru", description="which runs leave first")


class SsdSettings(_Section):
    """The data directory and how much of its disk may be used."""

    enabled: bool = Field(default=True, description="false: host memory only, nothing survives a restart")
    path: FilePath = Field(description="data directory: segments, index, lock")
    capacity_bytes: AutoBytes = Field(default="auto", description="hard limit; auto: from the free space")
    min_free_bytes: Bytes = Field(default=2 * GIB, ge=0, description="free space that is never used")
    segment_bytes: Bytes = Field(default=256 * MIB, ge=4 * MIB, le=16 * GIB, description="size of a segment")
    write_queue_bytes: Bytes = Field(default=256 * MIB, ge=MIB, description="what may wait for the disk")
    scrub_bytes_per_second: Bytes = Field(
        default=8 * MIB, ge=0, description="how fast stored blocks are re-read and checked; 0: never"
    )


class EncryptionSettings(_Section):
    """What of the SSD is encrypted, and where the keys come from; needs the extra `encryption`."""

    enabled: bool = Field(default=False, description="encrypt what is written from now on")
    key_file: FilePath | None = Field(
        default=None, description="keys of the tenants, TOML or JSON, mode 0600; read again on SIGHUP"
    )
    key_command: Command | None = Field(default=None, description="command that prints the keys instead")
    unlisted_tenants: Literal["host", "default_key"] = Field(
        default="host",
        description="tenants without a key: kept in host memory only, or on SSD by the default key",
    )


class ClassSettings(_Section):
    """A retention class; its name is the key."""

    ttl_seconds: Seconds = Field(
        gt=0, description="life of a block after its touch (sliding) or write (fixed)"
    )
    mode: TtlMode = Field(default=TtlMode.SLIDING, description="sliding or fixed")
    lowest_tier: StoredTier = Field(default=Tier.SSD, description="host or ssd")
    quota_bytes: Bytes = Field(default=0, ge=0, description="limit of the class in each tier; 0: none")
    admission: Admission = Field(
        default=Admission.FIRST, description="to SSD once put (first), or once used after that (second)"
    )


class LogSettings(_Section):
    """What is logged to stderr, and how."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level")
    format: Literal["key=value", "json"] = Field(default="key=value", description="one line per state change")


class Settings(_Section):
    """Everything that can be set."""

    server: ServerSettings
    host: HostSettings = HostSettings()
    ssd: SsdSettings
    encryption: EncryptionSettings = EncryptionSettings()
    classes: dict[str, ClassSettings]
    log: LogSettings = LogSettings()

    def retention_classes(self) -> tuple[RetentionClass, ...]:
        """Return the classes as the core takes them."""
        return tuple(
            RetentionClass(name, c.ttl_seconds, c.mode, c.lowest_tier, c.quota_bytes, c.admission)
            for name, c in self.classes.items()
        )


@dataclass(frozen=True, slots=True)
class Given:
    """One value of one layer, and where it came from in words a person can act on."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The merged settings and the origin of every key."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, object, str]]:
        """Return (key, JSON-ready value, origin) of every key; a secret shows as `***`."""
        plain = flatten(self.settings.model_dump(mode="python"))
        return [(key, _shown(key, value), self.origins.get(key, "default")) for key, value in plain]


def load(
    *, environ: Mapping[str, str], config: Path | None = None, flags: Sequence[tuple[str, str, object]] = ()
) -> Loaded:
    """Merge the layers and validate the result. `flags` are (flag as typed, key, value).

    Errors: SettingsError, one line per fault: key, origin, the nearest valid key or the limit.
    """
    given: dict[str, Given] = {}
    faults: list[str] = []
    layers = (_defaults(environ), _from_file(config, environ), _from_environment(environ), _from_flags(flags))
    for item in (item for layer in layers for item in layer):
        if (fault := _unknown(item)) is not None:
            faults.append(fault)
        given[item.key] = item
    if faults:
        raise SettingsError("\n".join(faults))
    try:
        settings = Settings.model_validate(_nested(given.values()))
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(error, given))) from None
    broken = [f"{_blame(given, *keys)}: {rule}" for keys, rule in broken_relations(settings)]
    if broken:
        raise SettingsError("\n".join(broken))
    return Loaded(settings, {key: item.origin for key, item in given.items()})


def broken_relations(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, rule) for every pair of settings that contradict each other."""
    server, host, ssd = settings.server, settings.host, settings.ssd
    if host.arena_bytes != "auto" and host.arena_bytes < 4 * MIB:
        yield ("host.arena_bytes",), f"an arena has at least {4 * MIB} bytes, got {host.arena_bytes}"
    if ssd.capacity_bytes != "auto" and ssd.capacity_bytes < SEGMENTS_MIN * ssd.segment_bytes:
        rule = f"{SEGMENTS_MIN} segments of {ssd.segment_bytes} bytes must fit in, got {ssd.capacity_bytes}"
        yield ("ssd.capacity_bytes", "ssd.segment_bytes"), rule
    if settings.encryption.key_file is not None and settings.encryption.key_command:
        yield ("encryption.key_file", "encryption.key_command"), "give one of the two"
    if settings.encryption.enabled and not has_keys(settings.encryption):
        yield ("encryption.enabled",), "needs keys: set encryption.key_file or encryption.key_command"
    if server.token.get_secret_value() and server.token_file is not None:
        yield ("server.token", "server.token_file"), "give one of the two"
    if (server.tls_cert is None) != (server.tls_key is None):
        yield ("server.tls_cert", "server.tls_key"), "a certificate needs its key and the other way round"
    if server.tls_client_ca is not None and server.tls_cert is None:
        yield ("server.tls_client_ca",), "client certificates need server.tls_cert and server.tls_key"
    for name in ("tcp_address", "metrics_address"):
        if getattr(server, name) and split_address(getattr(server, name)) is None:
            yield (f"server.{name}",), f"expected host:port, got {getattr(server, name)!r}"
    if server.socket_tokens and not has_tokens(server):
        yield ("server.socket_tokens",), "needs a token: set server.token_file or server.tokens_file"
    yield from _broken_tcp(server)
    for name in settings.classes:
        if not CLASS_NAME.fullmatch(name):
            yield (f"classes.{name}.ttl_seconds",), f"a class is named by {CLASS_NAME.pattern}, got {name!r}"


def has_keys(encryption: EncryptionSettings) -> bool:
    """Say whether there are keys; with encryption off they still serve to read what is encrypted."""
    return encryption.key_file is not None or bool(encryption.key_command)


def has_tokens(server: ServerSettings) -> bool:
    """Say whether any token is configured."""
    files = (server.token_file, server.tokens_file)
    return bool(server.token.get_secret_value()) or any(file is not None for file in files)


def _broken_tcp(server: ServerSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    if not server.tcp_address or (parsed := split_address(server.tcp_address)) is None:
        return
    if not has_tokens(server):
        rule = "TCP needs a token: set server.token_file or server.tokens_file (or server.token)"
        yield ("server.tcp_address",), rule
    if server.tls_cert is not None:
        return
    if not server.plaintext_loopback:
        rule = "TCP needs TLS: set server.tls_cert and server.tls_key, or on a loopback address "
        yield ("server.tcp_address",), rule + "server.plaintext_loopback = true"
    elif not is_loopback(parsed[0]):
        yield (
            ("server.tcp_address", "server.plaintext_loopback"),
            f"{parsed[0]} is no loopback address; TLS is needed",
        )


def split_address(address: str) -> tuple[str, int] | None:
    """Return (host, port) of `host:port` or `[v6]:port`, or None."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    return (host, int(port)) if host and port.isdecimal() and int(port) < 65536 else None


def is_loopback(host: str) -> bool:
    """Say whether a host can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def known_keys() -> tuple[str, ...]:
    """Return every valid key; `classes.<name>.` stands for any class."""
    keys = []
    for section, info in Settings.model_fields.items():
        model = ClassSettings if section == "classes" else info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        middle = ".<name>" if section == "classes" else ""
        keys += [f"{section}{middle}.{name}" for name in model.model_fields]
    return tuple(keys)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nested(given: Iterable[Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for item in given:
        node = tree
        *path, leaf = item.key.split(".")
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = item.value
    return tree


def _defaults(environ: Mapping[str, str]) -> Iterator[Given]:
    address = environ.get("KVSTORE_ADDRESS", "")
    if address.startswith("unix:"):
        yield Given("server.address", address, "environment KVSTORE_ADDRESS")
    else:
        yield Given("server.address", f"unix:{runtime_directory(environ) / SOCKET_NAME}", "default")
    yield Given("ssd.path", data_directory(environ), "default")
    for c in SHIPPED_CLASSES:
        values = ClassSettings(
            ttl_seconds=c.ttl_seconds,
            mode=c.mode,
            lowest_tier=c.lowest_tier,
            quota_bytes=c.quota_bytes,
            admission=c.admission,
        )
        for name, value in values.model_dump().items():
            yield Given(f"classes.{c.name}.{name}", value, "default")


def _from_file(config: Path | None, environ: Mapping[str, str]) -> Iterator[Given]:
    asked = "--config" if config else "environment KVSTORE_CONFIG"
    path = config or (Path(environ["KVSTORE_CONFIG"]) if environ.get("KVSTORE_CONFIG") else None)
    if path is None:
        return
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path} (from {asked}): {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} (from {asked}): not TOML: {error}") from error
    for key, value in flatten(tree):
        yield Given(key, value, f"file {path}")


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    # Without the double underscore a name is a setting only if it was plainly meant as one: orchestrators set
    # names such as KVSTORE_SERVICE_HOST by themselves.
    mistyped = {key.replace(".", "_") for key in known_keys()}
    for name in sorted(environ):
        path = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name.startswith(ENVIRONMENT_PREFIX) and ("__" in path or path in mistyped):
            yield Given(path.replace("__", "."), environ[name], f"environment {name}")


def _from_flags(flags: Sequence[tuple[str, str, object]]) -> Iterator[Given]:
    for flag, key, value in flags:
        yield Given(key, value, f"flag {flag}")


def _unknown(item: Given) -> str | None:
    parts = item.key.split(".")
    is_class = len(parts) == 3 and parts[0] == "classes"
    generic = f"classes.<name>.{parts[2]}" if is_class else item.key
    valid = known_keys()
    if generic in valid:
        return None
    near = difflib.get_close_matches(generic, valid, n=1, cutoff=0.0)[0]
    if is_class:
        near = near.replace("<name>", parts[1])
    hint = near
    if item.origin.startswith("environment "):
        hint = ENVIRONMENT_PREFIX + near.upper().replace(".", "__")
    return f"{item.origin}: unknown key {item.key!r}; the nearest valid key is {hint}"


def _explained(error: ValidationError, given: Mapping[str, Given]) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False):
        # A union adds its member's name behind the key.
        location = [str(part) for part in fault["loc"]]
        depth = 3 if location[0] == "classes" else 2
        key = ".".join(location[:depth])
        said = (
            fault["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be")
        )
        got = "" if key in _SECRETS or key not in given else f", got {given[key].value!r}"
        yield f"{_blame(given, key)}: {said}{got}"


def _blame(given: Mapping[str, Given], *keys: str) -> str:
    return " and ".join(f"{key} (from {given[key].origin if key in given else 'default'})" for key in keys)


def _shown(key: str, value: object) -> object:
    if isinstance(value, SecretStr):
        return "***" if value.get_secret_value() else ""
    if key.endswith("mode") and isinstance(value, int):
        return f"{value:04o}"
    if isinstance(value, float) and math.isinf(value):
        return "forever"
    return str(value) if isinstance(value, Path | TtlMode | Tier | Admission) else value
