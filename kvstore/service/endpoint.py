"""The Prometheus endpoint: a small HTTP server on a supervised thread."""

from __future__ import annotations

import socket
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from kvstore.service.threads import Supervisor

REQUEST_SECONDS = 10.0
POLL_SECONDS = 0.1


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: scrapes are no state changes."""


class Endpoint:
    """Serves what a collector yields at any path; `url` is where."""

    def __init__(self, collector: Collector, *, host: str, port: int) -> None:
        """Bind the port.

        Errors: OSError.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        kind = _ServerV6 if ":" in host else _Server
        self._server = make_server(host, port, make_wsgi_app(registry), kind, _Handler)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def start(self, supervisor: Supervisor) -> None:
        """Serve on a thread of its own until `stop`."""
        supervisor.start("metrics", lambda: self._server.serve_forever(POLL_SECONDS))

    def stop(self) -> None:
        """End the thread and free the port."""
        self._server.shutdown()
        self._server.server_close()
