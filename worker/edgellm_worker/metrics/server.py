"""HTTP on the metrics port: /metrics, /health/live, /health/ready.

It runs in threads of its own, so that it answers, and says so, while the event loop is stuck. Whatever is asked of it
it computes from `render` and `snapshot`, which must be safe to call from another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from threading import Thread
from types import TracebackType
from typing import ClassVar, Final, Self

from edgellm_worker.health import HealthSnapshot, not_live, not_ready
from edgellm_worker.metrics.exposition import CONTENT_TYPE

_TEXT: Final = "text/plain; charset=utf-8"
_CLIENT_TIMEOUT_S: Final = 10.0


class _Handler(BaseHTTPRequestHandler):
    timeout: ClassVar[float | None] = _CLIENT_TIMEOUT_S
    server: MetricsServer._Http

    def do_GET(self) -> None:
        owner = self.server.owner
        match self.path.partition("?")[0]:
            case "/metrics":
                self._send(HTTPStatus.OK, CONTENT_TYPE, owner.render())
            case "/health/live":
                self._verdict(not_live(owner.snapshot()))
            case "/health/ready":
                self._verdict(not_ready(owner.snapshot()))
            case _:
                self._send(HTTPStatus.NOT_FOUND, _TEXT, b"try /metrics, /health/live or /health/ready\n")

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def _verdict(self, reasons: list[str]) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        self._send(status, _TEXT, ("; ".join(reasons) or "ok").encode() + b"\n")

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Scrapes are not worth a line."""


class MetricsServer:
    """`port` 0 takes a free one; `url` says which. Raises `OSError` when the port is taken."""

    class _Http(ThreadingHTTPServer):
        daemon_threads = True
        owner: MetricsServer

    class _HttpOverIPv6(_Http):
        """On Linux `::` takes IPv4 as well."""

        address_family = AF_INET6

    def __init__(
        self, render: Callable[[], bytes], snapshot: Callable[[], HealthSnapshot], *, host: str, port: int
    ) -> None:
        self.render = render
        self.snapshot = snapshot
        self._http = (self._HttpOverIPv6 if ":" in host else self._Http)((host, port), _Handler)
        self._http.owner = self
        self._host = host
        self._thread = Thread(target=self._http.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._host, self._http.server_port
        shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - only compared
        return f"http://[{shown}]:{port}/metrics" if ":" in shown else f"http://{shown}:{port}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
