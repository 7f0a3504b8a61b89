"""The administration service as the commands see it, and the options that lead to it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, cast

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the library's own stderr lines are no answer to a user

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client.dial import Target
from kvstore.client.limits import ClientLimits, TlsFiles, Transport
from kvstore.errors import DeadlineExceeded, KVStoreError, TierUnavailable
from kvstore.paths import default_address
from kvstore.rpc.channel import ERROR_METADATA
from kvstore.rpc.status import error_from_call
from kvstore.rpc.stubs import admin_stub, data_stub
from kvstore.rpc.v1 import admin_pb2

CALL_SECONDS = 10.0
LISTEN_SECONDS = 1.0
COUNT_SECONDS = 60.0
"""What walks the index may take longer: it makes way for traffic."""

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        envvar="KVSTORE_ADDRESS",
        help="The daemon: unix:/path/to/socket or host:port. Without it, this user's own daemon.",
        show_default=False,
    ),
]
TokenOption = Annotated[
    str,
    typer.Option(
        "--token", metavar="TOKEN", envvar="KVSTORE_TOKEN", help="For host:port.", show_default=False
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Certificate to trust, for host:port."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
OfflineOption = Annotated[
    Path | None,
    typer.Option(
        "--offline", metavar="DIR", help="Read the data directory of a stopped daemon.", show_default=False
    ),
]


LIMITS = ClientLimits(plaintext_on_loopback=True)
"""A person who types a token and a loopback address means it; any other address still needs TLS."""


def tls_of(tls_ca: Path | None) -> TlsFiles | None:
    """Return what the client library takes for a certificate option."""
    return TlsFiles(str(tls_ca)) if tls_ca else None


def target_of(address: str, *, token: str, tls_ca: Path | None) -> Target:
    """Return where to connect.

    Errors: InvalidArgument on a malformed address, and on a token that would travel in the clear.
    """
    return Target(
        address=address, token=token, tls=tls_of(tls_ca), transport=Transport.AUTO, limits=LIMITS
    ).checked()


def listens(address: str) -> bool:
    """Return whether somebody accepts connections there; says nothing of whether it answers."""
    unix = address.removeprefix("unix:")
    try:
        if unix != address:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(LISTEN_SECONDS)
                probe.connect(unix)
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS).close()
    except OSError:
        return False
    return True


class Daemon:
    """A connection to one daemon. Threads: one at a time.

    Errors: TierUnavailable when nobody answers, DeadlineExceeded when somebody listens and does not answer.
    """

    def __init__(self, address: str | None = None, *, token: str = "", tls_ca: Path | None = None) -> None:
        self.address = address or default_address()
        target = target_of(self.address, token=token, tls_ca=tls_ca)
        self._metadata = target.metadata
        self.channel = target.channel()
        self._admin = admin_stub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.data = data_stub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()

    def status(self, *, deadline_seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """Return the daemon's status document."""
        reply = self._call(self._admin.Status, admin_pb2.StatusRequest(), deadline_seconds)
        document: dict[str, Any] = json.loads(reply.document)
        return document

    def document(self, verb: str, request: Any) -> dict[str, Any]:
        """Return the document that a verb of the administration service answers with."""
        reply: admin_pb2.Document = self._call(getattr(self._admin, verb), request, COUNT_SECONDS)
        document: dict[str, Any] = json.loads(reply.document)
        return document

    def serving(self) -> bool:
        """Return whether the standard health service says SERVING."""
        reply = self._call(self._health.Check, health_pb2.HealthCheckRequest(), CALL_SECONDS)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def namespaces(self) -> list[admin_pb2.NamespaceInfo]:
        """Return every namespace, with its canonical form and what it holds."""
        reply = self._call(self._admin.Namespaces, admin_pb2.NamespacesRequest(), CALL_SECONDS)
        return list(reply.namespaces)

    def inspect(
        self, namespace: bytes, *, keys: bytes = b"", hash_prefix: bytes = b"", limit: int = 0
    ) -> admin_pb2.InspectReply:
        """Return the runs that hold these keys, or whose hashes start so."""
        request = admin_pb2.InspectRequest(
            namespace=namespace, keys=keys, hash_prefix=hash_prefix, limit=limit
        )
        reply: admin_pb2.InspectReply = self._call(self._admin.Inspect, request, CALL_SECONDS)
        return reply

    def segments(self) -> list[admin_pb2.SegmentInfo]:
        """Return the segments of the SSD tier."""
        reply = self._call(self._admin.Segments, admin_pb2.SegmentsRequest(), CALL_SECONDS)
        return list(reply.segments)

    def verify(self, namespace: bytes = b"") -> Iterator[admin_pb2.VerifyReply]:
        """Let the daemon read everything again; yields its progress, the last one with `done`."""
        stream = self._admin.Verify(admin_pb2.VerifyRequest(namespace=namespace), metadata=self._metadata)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._mapped(error) from error

    def _call(self, method: Callable[..., Any], request: Any, deadline_seconds: float) -> Any:
        try:
            # A daemon that listens is given until the deadline, also when it is too busy to greet at once.
            waits = listens(self.address)
            return method(request, timeout=deadline_seconds, metadata=self._metadata, wait_for_ready=waits)
        except grpc.RpcError as error:
            raise self._mapped(error, deadline_seconds) from error

    def _mapped(self, error: grpc.RpcError, deadline_seconds: float = CALL_SECONDS) -> KVStoreError:
        call = cast(grpc.Call, error)
        if any(key == ERROR_METADATA for key, _ in call.trailing_metadata() or ()):
            return error_from_call(error)
        match call.code():
            case grpc.StatusCode.UNAVAILABLE:
                remedy = "start one with `kvstore serve`, or name another with --address"
                return TierUnavailable(f"no daemon answers at {self.address}: {remedy}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                remedy = "it hangs, is stopped or overloaded; look at its log"
                return DeadlineExceeded(
                    f"the daemon at {self.address} did not answer within {deadline_seconds:g} s: {remedy}"
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return TierUnavailable(
                    f"whoever listens at {self.address} is no kvstore daemon of this version"
                )
        return error_from_call(error)
