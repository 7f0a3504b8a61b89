"""Addresses and channels: what may be dialled how, and with which secrets."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.client.limits import ClientLimits, TlsFiles, Transport
from kvstore.errors import InvalidArgument
from kvstore.rpc.channel import CLIENT_OPTIONS, bearer

UNIX = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the daemon is and how to reach it. The token stays out of repr and logs."""

    address: str
    token: str
    tls: TlsFiles | None
    transport: Transport
    limits: ClientLimits

    def __repr__(self) -> str:
        return (
            f"Target({self.address!r}, tls={self.tls is not None}, token={'set' if self.token else 'none'})"
        )

    def checked(self) -> Target:
        """Return self after checking it.

        Errors: InvalidArgument on an address of neither form, on TLS over a unix socket, on a mapping over
        TCP, and on a token that would travel in the clear.
        """
        if self.is_unix:
            if self.tls is not None:
                raise InvalidArgument(f"address {self.address}: a unix socket takes no TLS files")
            return self
        host, port = _split(self.address)
        if self.transport is Transport.MAPPED:
            raise InvalidArgument(f"address {self.address}: the arena is mapped over unix sockets only")
        in_the_clear = self.token and self.tls is None
        if in_the_clear and not (self.limits.plaintext_on_loopback and _is_loopback(host)):
            raise InvalidArgument(
                f"address {self.address}: a token travels over TCP with TLS only; hand in TlsFiles, or on "
                f"this machine set ClientLimits(plaintext_on_loopback=True) and dial 127.0.0.1:{port}"
            )
        return self

    @property
    def is_unix(self) -> bool:
        """Say whether the address is a unix socket."""
        return self.address.startswith(UNIX)

    @property
    def path(self) -> str:
        """The path of a unix socket."""
        return self.address.removeprefix(UNIX)

    @property
    def host(self) -> str:
        """The host of a TCP address."""
        return _split(self.address)[0]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that every call carries."""
        return bearer(self.token)

    def channel(self) -> grpc.Channel:
        """Return a new channel; it connects on first use.

        Errors: InvalidArgument when a TLS file cannot be read.
        """
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=CLIENT_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls.ca),
            private_key=_read(self.tls.key) if self.tls.key else None,
            certificate_chain=_read(self.tls.certificate) if self.tls.certificate else None,
        )
        return grpc.secure_channel(self.address, credentials, options=CLIENT_OPTIONS)

    def tls_context(self) -> ssl.SSLContext:
        """Return what secures a plain socket, as the channel is.

        Errors: OSError when a TLS file cannot be read or used.
        """
        assert self.tls is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(self.tls.ca)
        if self.tls.certificate:
            context.load_cert_chain(self.tls.certificate, self.tls.key or None)
        return context


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"address {address!r}: expected unix:/path or host:port")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    # A name other than localhost may resolve to anything, so it does not count.
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls file {path}: cannot be read: {error.strerror}") from error
