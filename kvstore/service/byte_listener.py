"""Where payload connections arrive: they are accepted, secured and greeted, then handed to the byte port."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading

from kvstore.errors import InvalidArgument, KVStoreError, SettingsError, TierUnavailable
from kvstore.rpc.packets import GREETING_BYTES_MAX, Kind, packet
from kvstore.rpc.pipe import Left, Pipe, countdown
from kvstore.rpc.status import error_to_wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import Caller, CallerWith
from kvstore.service.byte_port import BytePort
from kvstore.service.greetings import greeting_back, greeting_in
from kvstore.settings import ServerSettings, split_address

_log = logging.getLogger(__name__)
GREETING_SECONDS = 5.0
GREETINGS_MAX = 64
"""Connections that have yet to say who they are; of more than that the oldest are closed."""
BACKLOG = 128
PORT_MAX = 65535
PAUSE_SECONDS = 0.1


class ByteListener:
    """Accepts on one listening socket; threads greet, and stay with their connection.

    Threads: `start` and `stop` any.
    """

    def __init__(
        self,
        listening: socket.socket,
        port: BytePort,
        *,
        caller_with: CallerWith,
        tls: ssl.SSLContext | None = None,
        greeting_seconds: float = GREETING_SECONDS,
    ) -> None:
        self._listening = listening
        self._port = port
        self._caller_with = caller_with
        self._tls = tls
        self._seconds = greeting_seconds
        self._lock = threading.Lock()
        self._greeting: dict[socket.socket, None] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kvstore-byte-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more, and let go of who has not greeted; idempotent."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(1.0)
        self._listening.close()
        with self._lock:
            for sock in self._greeting:
                _cut(sock)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = self._listening.accept()
            except OSError as error:
                if not self._stopping.wait(PAUSE_SECONDS):
                    _log.warning("payload connection not accepted", extra={"error": str(error)})
                continue
            # Of TCP the host alone: each stream is a connection here, and a host has so many of them.
            peer = str(address[0]) if isinstance(address, tuple) else "unix"
            thread = threading.Thread(
                target=self._serve, args=(sock, peer), name="kvstore-payload", daemon=True
            )
            with self._lock:
                if len(self._greeting) >= GREETINGS_MAX:
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    _cut(oldest)
                self._greeting[sock] = None
            try:
                thread.start()
            except RuntimeError as error:
                self._greeted(sock)
                sock.close()
                _log.warning("payload connection refused", extra={"peer": peer, "error": str(error)})

    def _serve(self, sock: socket.socket, peer: str) -> None:
        caller: Caller | None = None
        left = countdown(self._seconds)
        try:
            sock = self._secured(sock)
            caller = self._greet(Pipe(sock), left, peer)
        except OSError as error:
            _log.debug("payload connection not greeted", extra={"peer": peer, "error": repr(error)})
        except Exception:
            _log.exception("payload greeting failed", extra={"peer": peer})
        finally:
            self._greeted(sock)
            if caller is None:
                sock.close()
        if caller is not None:
            self._port.attend(sock, caller, peer=peer)

    def _greeted(self, sock: socket.socket) -> None:
        with self._lock:
            self._greeting.pop(sock, None)

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Return the socket with TLS, if the listener has it, before its handshake."""
        if self._tls is None:
            return sock
        sock.settimeout(self._seconds)
        secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            # From here on the descriptor belongs to the other object.
            if sock in self._greeting:
                self._greeting[secured] = self._greeting.pop(sock)
        return secured

    def _greet(self, pipe: Pipe, left: Left, peer: str) -> Caller | None:
        """Return who greeted, None when that was refused."""
        if isinstance(pipe.sock, ssl.SSLSocket):
            pipe.sock.do_handshake()
        try:
            caller = self._hear(pipe, left, peer)
        except KVStoreError as error:
            pipe.write([packet(Kind.ERROR, error_to_wire(error).SerializeToString())], left)
            pipe.linger()
            return None
        pipe.write([greeting_back(pb.PURPOSE_PAYLOAD)], left)
        return caller

    def _hear(self, pipe: Pipe, left: Left, peer: str) -> Caller:
        header = pipe.header(left, limit=GREETING_BYTES_MAX)
        body = pipe.body(header, left) if header.kind is Kind.GREETING else b""
        greeting = greeting_in(header, body)
        if greeting.purpose != pb.PURPOSE_PAYLOAD:
            raise InvalidArgument("greeting: this port is for payload; a session goes to the other one")
        return self._caller_with(greeting.token, peer)


def bind_byte_port(settings: ServerSettings, tcp_address: str) -> socket.socket | None:
    """Return a socket that listens beside a TCP port as bound, None where there is to be none, or where the
    port that was not named is taken.

    Errors: TierUnavailable when a port that was named cannot be bound.
    """
    parsed, said = split_address(settings.tcp_address), split_address(tcp_address)
    assert parsed is not None
    assert said is not None
    if settings.byte_port == "off":
        return None
    is_named = settings.byte_port != "next"
    port = int(settings.byte_port) if is_named else (said[1] + 1 if parsed[1] else 0)
    try:
        return _listening(parsed[0], port)
    except (OSError, OverflowError) as error:
        why = f"port {port} beside server.tcp_address {tcp_address} cannot be bound, is it taken? ({error})"
        if is_named:
            raise TierUnavailable(f"server.byte_port: {why}") from error
        _log.warning(
            "no byte port: payload goes through gRPC, which is slower; set server.byte_port",
            extra={"cause": why},
        )
        return None


def _listening(host: str, port: int) -> socket.socket:
    if port > PORT_MAX:  # the resolver would take it modulo that
        raise OverflowError(f"ports end at {PORT_MAX}")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)


def server_tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return what secures the byte port: the very files of the TCP port.

    Errors: SettingsError.
    """
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # nothing may come unasked between requests
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"server.tls_cert {settings.tls_cert}: {error}") from error
    return context


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
