"""Calls: their journal and their captured output."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

from .mask import Mask

if TYPE_CHECKING:
    from .shepherd import Shepherd

PIECE = 1 << 16
TAIL_BYTES = 8 << 10
Json = dict[str, Any]


class Call:
    """One call. Output is captured up to `cap` bytes: its head as it comes, its last bytes when it ends."""

    def __init__(self, key: str, digest: str, request: Json, stdin: bytes) -> None:
        self.key = key
        self.digest = digest
        self.argv: list[str] = request["argv"]
        self.stdin = memoryview(stdin)
        self.cap = int(request["output_bytes"])
        self.started = time.monotonic()
        timeout_s = request["timeout_s"]
        self.deadline = math.inf if timeout_s is None else self.started + float(timeout_s)
        self.shepherd: Shepherd  # from `launch` on
        self.pipes: dict[str, int] = {}
        self.chunks: list[tuple[str, bytes]] = []
        self.captured = 0
        self.tail: list[tuple[str, bytes]] = []
        self.totals = {"out": 0, "err": 0}
        self.reason: str | None = None  # why we ended it, where we did
        self.oom_before = 0
        self.result: Json | None = None
        self.subscribers: list[tuple[Any, int]] = []
        self.keeps = bool(request.get("keep_background"))
        self.main = 0  # the tool's own process
        secrets = list(request.get("secrets", {}).values())
        self.masks = {stream: Mask(secrets) for stream in ("out", "err")} if secrets else {}
        if secrets:
            self.argv = [self.masks["out"].whole(os.fsencode(word)).decode(errors="replace") for word in self.argv]

    def masked(self, stream: str, data: bytes) -> bytes:
        """What was printed without its secrets; the last bytes, if they may be the beginning of one, come later."""
        return self.masks[stream].read(data) if self.masks else data

    def capture(self, stream: str, data: bytes) -> bytes:
        """Counts `data`, keeps what fits, and returns the part to pass on now."""
        self.totals[stream] += len(data)
        head = data[: max(0, self.cap - min(TAIL_BYTES, self.cap // 4) - self.captured)]
        if head:
            self.chunks.append((stream, head))
            self.captured += len(head)
        if len(head) < len(data):
            self._keep_tail(stream, data[len(head) :])
        return head

    def _keep_tail(self, stream: str, data: bytes) -> None:
        room = min(TAIL_BYTES, self.cap // 4)
        self.tail.append((stream, data[-room:] if room else b""))
        size = sum(len(piece) for _, piece in self.tail)
        while size > room:
            name, piece = self.tail[0]
            cut = min(size - room, len(piece))
            self.tail[0] = (name, piece[cut:])
            size -= cut
            if not self.tail[0][1]:
                self.tail.pop(0)

    def close_output(self) -> list[tuple[str, bytes]]:
        """The last chunks: a marker for what was left out, and the output's tail."""
        left_out = sum(self.totals.values()) - self.captured - sum(len(piece) for _, piece in self.tail)
        last = list(self.tail)
        if left_out:
            last.insert(0, ("note", b"\n[... %d bytes left out ...]\n" % left_out))
        self.tail = []
        self.chunks += last
        return last

    def after(self, offset: int) -> list[tuple[str, bytes]]:
        """Captured chunks from a byte offset on."""
        out = []
        for stream, data in self.chunks:
            if offset < len(data):
                out.append((stream, data[offset:]))
            offset = max(0, offset - len(data))
        return out

    def output(self) -> bytes:
        """What is kept of it now."""
        return b"".join(data for _, data in self.chunks)

    def forget(self) -> None:
        """Lose the output, never the result."""
        self.chunks, self.captured = [], 0
        assert self.result is not None
        self.result["truncated"] = True

    def end(self, reason: str, code: int | None, background: int = 0) -> None:
        total = self.totals["out"] + self.totals["err"]
        kept = sum(len(data) for stream, data in self.chunks if stream != "note")
        self.result = {
            "reason": reason,
            "code": code,
            "stdout_bytes": self.totals["out"],
            "stderr_bytes": self.totals["err"],
            "truncated": kept < total,
            "duration_s": time.monotonic() - self.started,
            "background": background,
        }
        self.masks = {}
