"""Where the daemon can be reached: the unix socket, the TCP port with token and TLS, and who may pass."""

from __future__ import annotations

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

from kvstore.errors import PermissionRefused, SettingsError, TierUnavailable
from kvstore.events import Events
from kvstore.rpc.channel import SERVER_OPTIONS
from kvstore.rpc.status import error_metadata
from kvstore.service.parsing import ParseCheck
from kvstore.service.tokens import Role, Tokens
from kvstore.settings import ServerSettings, split_address

_log = logging.getLogger(__name__)
SOCKET_PATH_BYTES_MAX = 107
BACKLOG = 128
OPEN_TO_ALL = "/grpc.health.v1.Health/Check"
ADMIN_ONLY = "/kvstore.v1.Admin/"
CONNECTION_CALLS_MAX = 1024
"""Calls of all kinds on one TCP connection at a time; HTTP/2 lets the rest wait in the client."""
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
    _bind(path, settings, lambda: server.add_insecure_port(f"unix:{path}"))


def bind_plain(path: Path, settings: ServerSettings) -> socket.socket:
    """Return the listening plain socket beside gRPC's, not wider open; a leftover in its place is removed.

    Errors: TierUnavailable.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _exists(path) and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        _bind(path, settings, lambda: listening.bind(str(path)))
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


def _bind(path: Path, settings: ServerSettings, bind: Callable[[], object]) -> None:
    before = os.umask(0o177)
    try:
        bind()
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


class TokenCheck(grpc.aio.ServerInterceptor):
    """Lets calls with a valid bearer token pass, and administrators alone to the administration service.

    Asking for health is open to all; to watch it holds a stream, and needs a token.
    """

    def __init__(self, tokens: Tokens, events: Events) -> None:
        self._tokens = tokens
        self._events = events

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if method == OPEN_TO_ALL or handler is None:
            return handler
        grant = self._tokens.of(handler_call_details.invocation_metadata or ())
        if grant is not None and (grant.role is Role.ADMIN or not method.startswith(ADMIN_ONLY)):
            return handler
        self._events.add("kvstore_rpc_refusals_total")
        if grant is None:
            _log.warning("remote call without a valid token", extra={"method": method})
            refusal = _refusal(grpc.StatusCode.UNAUTHENTICATED, "a valid token is needed on this address")
        else:
            _log.warning("remote call of a tenant", extra={"method": method, "tenant": grant.tenant})
            refusal = _refusal(
                grpc.StatusCode.PERMISSION_DENIED, f"{method}: an administrator's token is needed"
            )
        if handler.request_streaming or handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refusal)
        return grpc.unary_unary_rpc_method_handler(refusal)


def _refusal(code: grpc.StatusCode, text: str) -> Any:
    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, text, error_metadata(PermissionRefused(text)))

    return refuse


def new_server(settings: ServerSettings, *, check: TokenCheck | None = None) -> grpc.aio.Server:
    """Return a server without ports."""
    sizes = {
        "grpc.max_receive_message_length": settings.message_bytes_max,
        "grpc.max_send_message_length": settings.message_bytes_max,
    }
    if check is not None:
        sizes["grpc.max_concurrent_streams"] = CONNECTION_CALLS_MAX
    options = [*(dict(SERVER_OPTIONS) | sizes).items()]
    return grpc.aio.server(options=options, interceptors=[*([check] if check else []), ParseCheck()])
