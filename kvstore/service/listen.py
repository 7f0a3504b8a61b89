"""Where the daemon can be reached: the unix socket, the TCP port with token and TLS, and who may pass."""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from kvstore.errors import SettingsError, TierUnavailable
from kvstore.events import Events
from kvstore.rpc.channel import AUTHORIZATION, SERVER_OPTIONS
from kvstore.settings import ServerSettings, split_address

_log = logging.getLogger(__name__)
SOCKET_PATH_BYTES_MAX = 107
TOKEN_CHARACTERS_MIN = 16
OPEN_TO_ALL = "/grpc.health.v1.Health/"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def prepare_socket(settings: ServerSettings) -> Path:
    """Return the socket's path, its directory made and a leftover of a dead daemon removed.

    A directory that is made here is as open as `socket_mode`; one that is there must be ours or root's.

    Errors: TierUnavailable when somebody listens there, or the place cannot be used.
    """
    path = Path(settings.address.removeprefix("unix:"))
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise TierUnavailable(
            f"socket {path}: {len(os.fsencode(path))} bytes long, the system allows {SOCKET_PATH_BYTES_MAX}; "
            "set server.address to a shorter one"
        )
    try:
        _prepare_directory(path.parent, settings)
        if not _exists(path):
            return path
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise TierUnavailable(
                f"socket {path}: something else has this name; remove it or set server.address"
            )
        if _answers(path):
            raise TierUnavailable(
                f"socket {path}: a daemon listens there already; stop it, or set another server.address"
            )
        path.unlink()
        _log.info("removed the socket of a daemon that is gone", extra={"path": str(path)})
    except (OSError, LookupError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TierUnavailable(f"socket {path}: {why}; set server.address to a place you may write") from error
    return path


def _prepare_directory(directory: Path, settings: ServerSettings) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        if settings.socket_group:
            shutil.chown(directory, group=settings.socket_group)
        # Who may use the socket must be able to reach it.
        group, others = settings.socket_mode & 0o060, settings.socket_mode & 0o006
        directory.chmod(0o700 | (0o050 if group else 0) | (0o005 if others else 0))
    owner = directory.stat().st_uid
    if owner not in (0, os.getuid()):
        raise TierUnavailable(
            f"socket directory {directory}: belongs to user {owner}, who could pose as the daemon; "
            "set server.address to a directory of your own"
        )


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
        return True


def bind_unix(server: grpc.aio.Server, path: Path, settings: ServerSettings) -> None:
    """Bind the socket, at no moment wider open than `socket_mode` says.

    Errors: TierUnavailable.
    """
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
        if settings.socket_group:
            shutil.chown(path, group=settings.socket_group)
        path.chmod(settings.socket_mode)
    except (RuntimeError, OSError, LookupError) as error:
        raise TierUnavailable(f"socket {path}: cannot be bound: {error}") from error
    finally:
        os.umask(before)


def bind_tcp(server: grpc.aio.Server, settings: ServerSettings) -> str:
    """Bind the TCP port and return host:port as bound.

    Errors: TierUnavailable, SettingsError.
    """
    parsed = split_address(settings.tcp_address)
    assert parsed is not None
    try:
        if settings.tls_cert is None:
            port = server.add_insecure_port(settings.tcp_address)
        else:
            port = server.add_secure_port(settings.tcp_address, _credentials(settings))
    except RuntimeError as error:
        raise TierUnavailable(
            f"server.tcp_address {settings.tcp_address}: cannot be bound, is it taken? ({error})"
        ) from error
    return f"{parsed[0]}:{port}"


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials:
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    chain = (_read("server.tls_key", settings.tls_key), _read("server.tls_cert", settings.tls_cert))
    authority = _read("server.tls_client_ca", settings.tls_client_ca) if settings.tls_client_ca else None
    try:
        return grpc.ssl_server_credentials([chain], authority, require_client_auth=authority is not None)
    except ValueError as error:
        raise SettingsError(f"server.tls_cert {settings.tls_cert}: {error}") from error


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{key} {path}: {error.strerror}") from error


def token_of(settings: ServerSettings) -> str:
    """Return the token that remote clients must present.

    Errors: SettingsError when the file is missing, open to others, or the token too short to be secret.
    """
    token, key = settings.token.get_secret_value(), "server.token"
    if settings.token_file is not None:
        key = f"server.token_file {settings.token_file}"
        token = _read("server.token_file", settings.token_file).decode(errors="replace").strip()
        if settings.token_file.stat().st_mode & 0o077:
            raise SettingsError(f"{key}: others may read it; chmod 600 {settings.token_file}")
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii() or not token.isprintable():
        raise SettingsError(f"{key}: a token has at least {TOKEN_CHARACTERS_MIN} printable ASCII characters")
    return token


class TokenCheck(grpc.aio.ServerInterceptor):
    """Lets calls with the right bearer token pass; only health is open to all."""

    def __init__(self, token: str, events: Events) -> None:
        self._expected = f"Bearer {token}".encode()
        self._events = events
        self._refusal: Handler = grpc.unary_unary_rpc_method_handler(_refuse)
        self._stream_refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse_stream)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(OPEN_TO_ALL) or handler is None:
            return handler
        if self._has_token(handler_call_details.invocation_metadata or ()):
            return handler
        self._events.add("kvstore_rpc_refusals_total")
        _log.warning("remote call without the right token", extra={"method": handler_call_details.method})
        return (
            self._stream_refusal if handler.request_streaming or handler.response_streaming else self._refusal
        )

    def _has_token(self, metadata: Any) -> bool:
        for key, value in metadata:
            if key == AUTHORIZATION:
                given = value if isinstance(value, bytes) else str(value).encode(errors="replace")
                return hmac.compare_digest(given, self._expected)
        return False


async def _refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed on this address")


async def _refuse_stream(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await _refuse(requests, context)


def new_server(settings: ServerSettings, *, check: TokenCheck | None = None) -> grpc.aio.Server:
    """Return a server without ports."""
    sizes = {
        "grpc.max_receive_message_length": settings.message_bytes_max,
        "grpc.max_send_message_length": settings.message_bytes_max,
    }
    options = [*(dict(SERVER_OPTIONS) | sizes).items()]
    return grpc.aio.server(options=options, interceptors=[check] if check else None)
