"""The way out: connections of tools to a port of our own loopback, carried to the controller that is the exit.

Nothing in here decides what is allowed, or looks up a name: the bytes of each connection are a numbered stream of
frames, in both directions, to the one connection that has asked to be the exit. Frames to it carry "stream" and one of
"opened", a body, "end" (the tool says no more), "room" (bytes that the tool has taken) and "gone"; it answers with the
same. Neither side sends more than WINDOW bytes of a stream that the other has not taken, so a slow one on either side
costs no memory and stops nobody else.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .wire import Broken, Connection

WINDOW = 1 << 17
PIECE = 1 << 16
MAX_STREAMS = 256
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what was cut off must not look complete
NOBODY = (
    b"HTTP/1.1 503 No way out now\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"no way out of the sandbox now: it is open only while a step of the session runs\n"
)
Json = dict[str, Any]


class Stream:
    """One connection of a tool. Without an exit (`number` 0) it is answered, and what it says is thrown away."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.room = WINDOW  # what the exit takes before it has said more
        self.waiting = bytearray()  # for the tool
        self.said = False  # the tool says no more
        self.heard = False  # the tool will hear no more than what waits
        self.told = False  # and has been told so
        self.watched = 0  # events that wake us

    def events(self) -> int:
        read = selectors.EVENT_READ if self.room and not self.said else 0
        write = selectors.EVENT_WRITE if self.waiting or (self.heard and not self.told) else 0
        return read | write


class WayOut:
    """Closed until a controller asks to be the exit; the newest one is it, and without one a tool is told so."""

    def __init__(
        self, selector: selectors.BaseSelector, rearm: Callable[[Connection], None], drop: Callable[[Connection], None]
    ) -> None:
        self.selector = selector
        self.rearm = rearm
        self.drop = drop
        self.listener: socket.socket | None = None
        self.exit: Connection | None = None
        self.request = 0  # of the exit; its frames carry it
        self.count = 0
        self.streams: set[Stream] = set()
        self.numbered: dict[int, Stream] = {}

    def environment(self) -> dict[str, str]:
        """What tells a tool of the way out."""
        if self.listener is None:
            return {}
        url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        names = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), url)
        names["no_proxy"] = "localhost,127.0.0.1,::1"
        return {**names, **{name.upper(): value for name, value in names.items()}}

    def op_exit(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        if self.listener is None:
            listener = socket.socket()
            listener.setblocking(False)
            listener.bind(("127.0.0.1", 0))
            listener.listen(MAX_STREAMS)
            self.listener = listener
            self.listen(True)
        if self.exit is not None and self.exit is not connection:
            with suppress(Broken):
                self.exit.send({"id": self.request, "replaced": True})
            self.drop(self.exit)
        self.exit, self.request = connection, header["id"]
        return {"port": self.listener.getsockname()[1]}, b""

    def op_relay(self, connection: Connection, header: Json, body: bytes) -> None:
        """What the exit says of one stream; of one that is gone, nothing is to be said."""
        stream = self.numbered.get(header["stream"])
        if stream is None or connection is not self.exit:
            return
        if len(stream.waiting) + len(body) > WINDOW:
            raise Broken("the exit sends more than there is room for")
        stream.waiting += body
        stream.heard = stream.heard or bool(header.get("end"))
        stream.room += int(header.get("room", 0))
        if header.get("gone"):
            self.close(stream, reset=True)
        else:
            self.pump(stream, selectors.EVENT_WRITE)

    def leave(self, connection: Connection) -> None:
        """The exit is gone: what went through it is cut off."""
        if connection is self.exit:
            self.exit = None
            for stream in list(self.numbered.values()):
                self.close(stream, reset=True)

    def listen(self, wanted: bool) -> None:
        assert self.listener is not None
        listening = self.listener in self.selector.get_map()
        if wanted and not listening:
            self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        elif listening and not wanted:
            self.selector.unregister(self.listener)

    def accept(self, _: int) -> None:
        assert self.listener is not None
        try:
            sock, _address = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self.listen(not self.streams)  # no descriptor left: until one of ours is closed
            return
        sock.setblocking(False)
        self.count += 1
        stream = Stream(sock, self.count if self.exit is not None else 0)
        self.streams.add(stream)
        self.listen(len(self.streams) < MAX_STREAMS)
        if self.exit is None:
            stream.waiting += NOBODY
            stream.heard = True
        else:
            self.numbered[stream.number] = stream
            self.tell(stream, {"opened": True})
        self.watch(stream)

    def tell(self, stream: Stream, header: Json, body: bytes = b"") -> None:
        connection = self.exit
        if connection is None or not stream.number:
            return
        try:
            connection.send({"id": self.request, "stream": stream.number, **header}, body)
            self.rearm(connection)
        except Broken:
            self.drop(connection)

    def pump(self, stream: Stream, mask: int) -> None:
        """Moves what can be moved now, in both directions."""
        try:
            if mask & selectors.EVENT_READ:
                self.hear(stream)
            if mask & selectors.EVENT_WRITE:
                self.answer(stream)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.tell(stream, {"gone": True})
            self.close(stream, reset=True)
        if stream.said and stream.told:
            self.close(stream)
        self.watch(stream)

    def hear(self, stream: Stream) -> None:
        data = stream.sock.recv(min(PIECE, stream.room) if stream.number else PIECE)
        if not data:
            stream.said = True
            self.tell(stream, {"end": True})
        elif stream.number:
            stream.room -= len(data)
            self.tell(stream, {}, data)

    def answer(self, stream: Stream) -> None:
        if stream.waiting:
            count = stream.sock.send(stream.waiting)
            del stream.waiting[:count]
            self.tell(stream, {"room": count})
        if stream.heard and not stream.waiting and not stream.told:
            stream.sock.shutdown(socket.SHUT_WR)
            stream.told = True

    def watch(self, stream: Stream) -> None:
        events = stream.events() if stream in self.streams else 0
        if events == stream.watched:
            return
        if stream.watched:
            self.selector.unregister(stream.sock)
        if events:
            self.selector.register(stream.sock, events, lambda mask: self.pump(stream, mask))
        stream.watched = events

    def close(self, stream: Stream, *, reset: bool = False) -> None:
        if stream not in self.streams:
            return
        self.streams.discard(stream)
        self.numbered.pop(stream.number, None)
        self.watch(stream)
        if reset:
            with suppress(OSError):
                stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream.sock.close()
        self.listen(True)
