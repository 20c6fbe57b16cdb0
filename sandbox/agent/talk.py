"""A call that is talked with: its input stays open, and its output is read by offset, at the reader's pace."""

from __future__ import annotations

from typing import Any

from .calls import PIECE, TAIL_BYTES, Call

MAX_UNREAD_INPUT = 16 << 20
Json = dict[str, Any]


class Talk(Call):
    """Offsets count the bytes of standard output from its first one. The last `cap` bytes are kept, and a little of
    standard error; nothing is sent before somebody asks, so a call that never stops talking costs nobody memory."""

    def __init__(self, key: str, digest: str, request: Json, stdin: bytes) -> None:
        super().__init__(key, digest, request, stdin)
        self.open = True
        self.said = {"out": bytearray(), "err": bytearray()}
        self.written: dict[str, set[int]] = {}  # writes that must not be repeated, and what ran when they came
        self.terminal = bool(request.get("terminal"))
        self.readers: list[tuple[Any, int, int]] = []  # connection, request, offset

    def capture(self, stream: str, data: bytes) -> bytes:
        self.totals[stream] += len(data)
        said = self.said[stream]
        said += data
        del said[: max(0, len(said) - (self.cap if stream == "out" else TAIL_BYTES))]
        return b""

    def close_output(self) -> list[tuple[str, bytes]]:
        self.chunks = [(stream, bytes(said)) for stream, said in self.said.items()]
        self.captured = sum(len(said) for said in self.said.values())
        return []

    def after(self, offset: int) -> list[tuple[str, bytes]]:
        return []

    def output(self) -> bytes:
        return bytes(self.said["out"] + self.said["err"])

    def forget(self) -> None:
        super().forget()
        self.said = {"out": bytearray(), "err": bytearray()}

    def piece(self, offset: int) -> tuple[Json, bytes]:
        """Output from an offset on, or from the first byte that is still kept; the result with the last piece."""
        end, said = self.totals["out"], self.said["out"]
        start = min(end, max(offset, end - len(said)))
        skip = start - (end - len(said))
        data = bytes(said[skip : skip + PIECE])
        over = self.result if start + len(data) == end else None
        return {"offset": start, "end": end, "result": over}, data

    def listen(self, data: bytes) -> None:
        self.stdin = memoryview(bytes(self.stdin) + data)
