"""Authorities, and certificates that they have signed, made with openssl for one test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class Certificate:
    """A PEM certificate and its key."""

    cert: Path
    key: Path

    def credentials(self, authority: Certificate) -> grpc.ChannelCredentials:
        """Return what a client presents that trusts an authority."""
        return grpc.ssl_channel_credentials(
            authority.cert.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )


def authority(place: Path, name: str) -> Certificate:
    """Make an authority."""
    made = Certificate(place / f"{name}.pem", place / f"{name}.key")
    _openssl(f"req -x509 {_new_key(made)} -days 1 -subj /CN={name} -out {made.cert}")
    return made


def signed(place: Path, name: str, by: Certificate) -> Certificate:
    """Make a certificate for `localhost`, signed by an authority."""
    made = Certificate(place / f"{name}.pem", place / f"{name}.key")
    request, extensions = place / f"{name}.csr", place / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost\n")
    _openssl(f"req {_new_key(made)} -subj /CN={name} -out {request}")
    _openssl(
        f"x509 -req -in {request} -CA {by.cert} -CAkey {by.key} -CAcreateserial -days 1 "
        f"-extfile {extensions} -out {made.cert}"
    )
    return made


def _new_key(made: Certificate) -> str:
    return f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {made.key}"


def _openssl(arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)
