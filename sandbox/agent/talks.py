"""What a controller may do with calls that are talked with."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any

from .calls import Call
from .errors import Refused
from .runs import Runs
from .shepherd import resize
from .talk import MAX_UNREAD_INPUT, Talk
from .wire import Broken, Connection

END_OF_INPUT = b"\4\4"  # a terminal takes the first one as the end of a line that was begun
Json = dict[str, Any]
Reply = tuple[Json, bytes]


class Talks(Runs):
    def talk_operations(self) -> dict[str, Callable[[Connection, Json, bytes], Reply | None]]:
        return {
            "write": self.op_write,
            "wrote": self.op_wrote,
            "close": self.op_close,
            "output": self.op_output,
            "resize": self.op_resize,
        }

    def talk(self, key: str) -> Talk:
        call = self.calls.get(key)
        if not isinstance(call, Talk):
            raise Refused("request", f"no call {key!r} was started with an open input")
        return call

    def op_write(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """Takes the bytes whole; a name in `once` that was there before makes it a no-op."""
        call = self.talk(header["key"])
        once = header.get("once")
        if once is not None and once in call.written:
            return {"written": False}, b""
        if call.result is not None or not call.open or "in" not in call.pipes:
            raise Refused("os", f"the input of the call {call.key!r} is closed")
        if len(call.stdin) + len(body) > MAX_UNREAD_INPUT:
            raise Refused("busy", f"the call {call.key!r} does not read its input")
        if once is not None:
            call.written[once] = self.tree(call)
        call.listen(body)
        self.say(call)
        return {"written": True}, b""

    def op_wrote(self, connection: Connection, header: Json, body: bytes) -> Reply:
        return {"wrote": header["once"] in self.talk(header["key"]).written}, b""

    def op_close(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """The call sees the end of its input after what was written. Repeated: a no-op."""
        call = self.talk(header["key"])
        if call.terminal and call.open:
            call.listen(END_OF_INPUT)  # nobody hangs up: its output goes on
        call.open = False
        self.say(call)
        return {}, b""

    def op_resize(self, connection: Connection, header: Json, body: bytes) -> Reply:
        call = self.talk(header["key"])
        if not call.terminal:
            raise Refused("request", f"the call {call.key!r} has no terminal")
        if "out" in call.pipes:
            resize(call.pipes["out"], header["size"])
        return {}, b""

    def say(self, call: Talk) -> None:
        """Let the loop move what waits for the call's input, and close it if that was all."""
        fd = call.pipes.get("in")
        if fd is not None and fd not in self.selector.get_map():
            self.selector.register(fd, selectors.EVENT_WRITE, lambda _: self.pump(call, "in"))

    def op_output(self, connection: Connection, header: Json, body: bytes) -> Reply | None:
        """What was said from an offset on, at once or when there is some; without an offset, where the end is now."""
        call = self.talk(header["key"])
        offset = header["offset"]
        if offset is None:
            return call.piece(call.totals["out"])
        if offset < call.totals["out"] or call.result is not None:
            return call.piece(int(offset))
        call.readers.append((connection, header["id"], int(offset)))
        return None

    def heard(self, call: Call) -> None:
        if not isinstance(call, Talk) or (call.result is None and not call.readers):
            return
        waiting = [each for each in call.readers if each[2] < call.totals["out"] or call.result is not None]
        call.readers = [each for each in call.readers if each not in waiting]
        for connection, number, offset in waiting:
            header, data = call.piece(offset)
            try:
                connection.send({"id": number, **header}, data)
                self.rearm(connection)
            except Broken:
                self.drop(connection)

    def hang_up(self, connection: Connection) -> None:
        for call in self.calls.values():
            if isinstance(call, Talk):
                call.readers = [each for each in call.readers if each[0] is not connection]
