"""A real HTTP server for tests of HTTP tools."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Seen:
    """Requests that a plain HTTP server got, and what it is to do with the next ones."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.together = threading.Barrier(1)
        self.url = ""


@contextmanager
def http_server() -> Iterator[Seen]:
    """Tells by its path: /status/N, /big/BYTES, /to?url=..., /wait (until as many wait as `together` wants)."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            path, _, query = self.path.partition("?")
            body = self.rfile.read(length).decode()
            asked = {"method": self.command, "path": path, "query": query, "body": body, "headers": dict(self.headers)}
            seen.requests.append(asked)
            self.respond(path, query, asked)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def respond(self, path: str, query: str, asked: dict[str, Any]) -> None:
            status, kind, data = 200, "application/json", json.dumps(asked).encode()
            if path.startswith("/status/"):
                status, kind, data = int(path[8:]), "text/plain", b"as you wish"
            elif path.startswith("/big/"):
                kind, data = "text/plain", b"x" * int(path[5:])
            elif path == "/image":
                kind, data = "image/png", bytes(range(256))
            elif path == "/invalid":
                kind, data = "text/plain", b"a\xff\xfe\x00b"
            elif path == "/wait":
                seen.together.wait(20)
            elif path == "/hang":
                self.connection.recv(1)  # until the client has had enough
                return
            self.send_response(302 if path == "/to" else status)
            if path == "/to":
                self.send_header("location", unquote(query.removeprefix("url=")))
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except OSError:
                return  # it has read enough

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
