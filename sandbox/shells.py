"""A bash that keeps its state between calls: the folder it is in, its variables, its jobs.

It is a call with an open input that outlives whoever speaks with it. A command is sent as four fields, each ended by
NUL: a mark for its beginning, the call's name, the command, and a mark for its end. The shell reads the last one only
after the command, from a descriptor that the command does not have, so nothing that a command prints can be taken for
its end; and it starts no process for that, which a deadline could hit. It does so in the condition of the loop, with
another loop around it: a `continue` or `break` that belongs to no loop of the command's own ends the command only.
Both marks come from the sandbox's token, which no tool knows: whoever comes back to a call after a crash finds its
output again. What jobs print between two calls is nobody's.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from contextlib import suppress
from dataclasses import dataclass

from .driver import Sandbox
from .errors import OperationFailed
from .spec import Reason, Result

RING_BYTES = 4 << 20
TAIL_BYTES = 8 << 10
GRACE_S = 2.0
SHELLS_TRIED = 3  # of a command whose shells end before they begin it
LOOP = r"""
exec 198<&0 199>&1 </dev/null 2>&1
while :; do
  while
    TENUTO_STATUS=$?
    if [[ $TENUTO_OPEN ]]; then
      IFS= builtin read -r -d '' -u 198; builtin printf '\0%d %s\0' "$TENUTO_STATUS" "$REPLY" >&199
    fi
    TENUTO_OPEN=
    IFS= builtin read -r -d '' -u 198 && builtin printf '\0%s\0' "$REPLY" >&199 &&
      IFS= builtin read -r -d '' -u 198 TENUTO_CALL_KEY && export TENUTO_CALL_KEY &&
      IFS= builtin read -r -d '' -u 198 || exit
  do
    TENUTO_OPEN=1
    eval "$REPLY" 198<&- 199>&-
  done
done
"""
ARGV = ("bash", "--norc", "--noprofile", "-c", LOOP, "shell")


@dataclass(frozen=True)
class Ran:
    """How a command ended. `fresh`: in a shell that was started for it, without the state of earlier calls; `over`: its
    shell has ended with it, so the next one will be fresh."""

    result: Result
    fresh: bool
    over: bool


class Shell:
    """The shell of a sandbox. Commands run one after another, each once under its name, whoever asks how often."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def run(self, call: str, command: str, *, timeout_s: float, output_bytes: int) -> Ran:
        """At the deadline what the command began is killed, and the shell only where it does not go on then.

        Raises SandboxLost, SandboxBusy.
        """
        begun, first = time.monotonic(), 1
        for _ in range(SHELLS_TRIED):
            try:
                key, fresh, offset = await self._send(call, command, first)
            except OperationFailed:
                await self._bury(call)
                key, fresh, offset = await self._send(call, command, first)
            heard = _Heard(self._mark(call, "begin"), self._mark(call, "end"), output_bytes, offset)
            timed_out = not await self._listen(key, heard, timeout_s)
            if not heard.never_began:
                break
            first = _number(key) + 1  # it was being killed, by a restore, while it took the command
        if timed_out:
            await self._interrupt(key, call, heard)
        over = heard.over
        reason: Reason = "exit" if over is None else over.reason
        code = heard.code if over is None else over.code
        output, total = heard.output(), heard.total
        result = Result(
            "timeout" if timed_out else reason, code, total, 0, heard.left_out > 0, time.monotonic() - begun, output
        )
        return Ran(result, fresh, over is not None)

    async def _send(self, call: str, command: str, first: int) -> tuple[str, bool, int]:
        """The key of the shell that has the command now, whether it is fresh, and where to read from."""
        key, fresh = await self._find(call, first=first)
        offset = 0
        if not await self.sandbox.wrote(key, call):
            offset = (await self.sandbox.read(key, None)).end
            fields = (self._mark(call, "begin"), call, command, self._mark(call, "end"))
            await self.sandbox.write(key, "".join(f"{field}\0" for field in fields).encode(), once=call)
        return key, fresh, offset

    async def _bury(self, call: str) -> None:
        """Waits for the end of a shell that takes no more commands: a restore has killed it, or it has closed its input
        itself, and then it is killed now."""
        key, _ = await self._find(call, start=False)
        heard = _Heard(self._mark(call, "begin"), self._mark(call, "end"), 0, 0)
        if key and not await self._listen(key, heard, GRACE_S):
            await self.sandbox.kill(key)
            await self._listen(key, heard, GRACE_S)

    async def stop(self, call: str) -> None:
        """Ends a command that runs, as at a deadline."""
        key, _ = await self._find(call, start=False)
        if key and await self.sandbox.wrote(key, call):
            heard = _Heard(self._mark(call, "begin"), self._mark(call, "end"), 0, 0)
            if not await self._listen(key, heard, 0.0):
                await self._interrupt(key, call, heard)

    async def _find(self, call: str, *, start: bool = True, first: int = 1) -> tuple[str, bool]:
        """The key of the shell that runs, or of an ended one that had this call; else of a new one. From the `first`
        on."""
        number = first
        while True:
            key = f"shell/{number}"
            state = await self.sandbox.lookup(key, output=False)
            if state is None:
                if not start:
                    return "", False
                await self.sandbox.start(key, ARGV, stdin_open=True, output_bytes=RING_BYTES)
                return key, True
            if not isinstance(state, Result) or await self.sandbox.wrote(key, call):
                return key, False
            number += 1

    async def _listen(self, key: str, heard: _Heard, timeout_s: float) -> bool:
        """Reads until the command or its shell has ended; False where that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.1)):
                while not heard.ended:
                    said = await self.sandbox.read(key, heard.offset)
                    heard.take(said.offset, said.data)
                    if said.result is not None and not heard.ended:
                        heard.over = said.result
        return heard.ended

    async def _interrupt(self, key: str, call: str, heard: _Heard) -> None:
        await self.sandbox.kill(key, since=call)
        if not await self._listen(key, heard, GRACE_S):
            await self.sandbox.kill(key)
            await self._listen(key, heard, GRACE_S)

    def _mark(self, call: str, which: str) -> str:
        return hmac.new(self.sandbox.handle.token.encode(), f"shell {which} {call}".encode(), "sha256").hexdigest()


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


class _Heard:
    """What a command printed, between its marks: its head and its end, as much as is kept of a call's output."""

    def __init__(self, begin: str, end: str, cap: int, offset: int) -> None:
        self.offset = offset
        self.total = 0
        self.code: int | None = None
        self.over: Result | None = None
        self._begin = f"\0{begin}\0".encode()
        self._end = re.compile(rb"\0(\d{1,3}) " + end.encode() + rb"\0")
        self._longest = len(end) + 6
        self._begun = False
        self._missed = False  # something was printed that nobody kept
        self._pending = bytearray()
        self._tail_room = min(TAIL_BYTES, cap // 4)
        self._head_room = cap - self._tail_room
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def ended(self) -> bool:
        return self.code is not None or self.over is not None

    @property
    def never_began(self) -> bool:
        """Its shell has ended, and said nothing of the command, which it does before anything else."""
        return self.over is not None and not self._begun and not self._missed

    def take(self, offset: int, data: bytes) -> None:
        self._missed = self._missed or offset != self.offset
        if self._begun:
            self.total += offset - self.offset  # nobody kept what is missing
        self.offset = offset + len(data)
        self._pending += data
        if not self._begun:
            _, mark, rest = self._pending.partition(self._begin)
            self._begun = bool(mark)
            if mark:
                self._pending = rest
        found = self._end.search(self._pending)
        if found is not None:
            self.code = int(found[1])
            self._keep(self._pending[: found.start()] if self._begun else b"")
        else:
            self._settle(self._longest)

    def _settle(self, longest: int) -> None:
        """What cannot be part of a mark any more."""
        sure = max(0, len(self._pending) - longest)
        if self._begun:
            self._keep(self._pending[:sure])
        del self._pending[:sure]

    def _keep(self, data: bytes | bytearray) -> None:
        self.total += len(data)
        room = self._head_room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_room)]

    @property
    def left_out(self) -> int:
        return self.total - len(self._head) - len(self._tail)

    def output(self) -> bytes:
        if self.code is None:
            self._settle(0)  # its shell ended without a word
        marker = b"\n[... %d bytes left out ...]\n" % self.left_out if self.left_out else b""
        return bytes(self._head) + marker + bytes(self._tail)
