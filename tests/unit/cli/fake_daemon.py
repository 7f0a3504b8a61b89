"""An administration service that answers what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc


@dataclass
class Answers:
    """What the service says, and what it was asked."""

    document: dict[str, Any] = field(default_factory=dict)
    namespaces: list[admin_pb2.NamespaceInfo] = field(default_factory=list)
    inspect: admin_pb2.InspectReply = field(default_factory=admin_pb2.InspectReply)
    segments: list[admin_pb2.SegmentInfo] = field(default_factory=list)
    verify: list[admin_pb2.VerifyReply] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)


class _Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def Status(self, request: Any, context: Any) -> admin_pb2.StatusReply:
        return admin_pb2.StatusReply(document=json.dumps(self._answers.document))

    def Namespaces(self, request: Any, context: Any) -> admin_pb2.NamespacesReply:
        return admin_pb2.NamespacesReply(namespaces=self._answers.namespaces)

    def Inspect(self, request: Any, context: Any) -> admin_pb2.InspectReply:
        self._answers.asked.append(request)
        return self._answers.inspect

    def Segments(self, request: Any, context: Any) -> admin_pb2.SegmentsReply:
        return admin_pb2.SegmentsReply(segments=self._answers.segments)

    def Verify(self, request: Any, context: Any) -> Iterator[admin_pb2.VerifyReply]:
        self._answers.asked.append(request)
        yield from self._answers.verify


@contextmanager
def fake_daemon(directory: Path, answers: Answers) -> Iterator[str]:
    """Serve the answers on a socket in `directory`; yields the address."""
    address = f"unix:{directory / 'fake.sock'}"
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        admin_pb2_grpc.add_AdminServicer_to_server(_Admin(answers), server)
        serving = health.HealthServicer()
        serving.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(serving, server)
        server.add_insecure_port(address)
        server.start()
        try:
            yield address
        finally:
            server.stop(None).wait()
