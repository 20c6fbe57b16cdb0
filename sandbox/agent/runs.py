"""Running calls: started once by key, pumped, published to whoever follows, ended as a whole tree."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import time
from abc import abstractmethod
from contextlib import suppress
from typing import Any

from .calls import PIECE, Call
from .errors import Refused
from .files import FileOperations
from .processes import below, kill, name_of, processes, send_signal, younger
from .shepherd import END, PID, Shepherd, launch
from .talk import Talk
from .wire import Broken, Connection

JOURNAL_BYTES = 32 << 20
SPARE_S = 0.02
TICK_S = 0.05
Json = dict[str, Any]


class Runs(FileOperations):
    """The journal and what runs of it. A call is in `calls` for ever, in `shepherds` while any process of it lives."""

    def __init__(self, config: Json) -> None:
        super().__init__(config["work"])
        self.config = config
        self.calls: dict[str, Call] = {}
        self.shepherds: dict[int, Call] = {}
        self.spare: Shepherd | None = None
        self.going: set[int] = set()
        self.look_again = 0.0
        self.paused_at: float | None = None
        self.spare_at = 0.0  # not while the call that took the last one starts
        self.selector = selectors.DefaultSelector()
        self.oom_counters = [fd for place in config["oom_counters"] if (fd := counter(place)) is not None]

    @abstractmethod
    def rearm(self, connection: Connection) -> None: ...

    @abstractmethod
    def drop(self, connection: Connection) -> None: ...

    def heard(self, call: Call) -> None:
        """A call has said something, or has ended."""

    def op_start(self, connection: Connection, header: Json, body: bytes) -> None:
        secrets = header.get("secrets", {})
        text = json.dumps([header["argv"], {**header["env"], **secrets}, header["cwd"]], sort_keys=True).encode()
        digest = hashlib.sha256(len(text).to_bytes(8, "big") + text + body).hexdigest()
        call = self.calls.get(header["key"])
        if call is None:
            call = self.spawn(header, digest, body)
        elif call.digest != digest:
            raise Refused("conflict", f"the call {header['key']!r} was started with another command")
        connection.send({"id": header["id"], "taken": True})
        for stream, data in call.after(int(header.get("offset", 0))):
            connection.send({"id": header["id"], "stream": stream}, data)
        if call.result is not None:
            connection.send({"id": header["id"], "result": call.result})
        else:
            call.subscribers.append((connection, header["id"]))

    def spawn(self, header: Json, digest: str, stdin: bytes) -> Call:
        kind = Talk if header.get("stdin_open") else Call
        call = kind(header["key"], digest, header, stdin)
        call.oom_before = self.oom_kills()
        spare, self.spare = self.spare, None
        now = time.monotonic()
        self.spare_at = now + SPARE_S
        if not self.shepherds:
            self.look_again = now + TICK_S
        launch(call, header, self.directory(header["cwd"]), spare or Shepherd(self.config), self.config)
        self.calls[call.key] = call
        self.shepherds[call.shepherd.pid] = call
        line = call.shepherd.line
        self.selector.register(line, selectors.EVENT_READ, lambda _: self.news(call))
        for name, fd in call.pipes.items():
            event = selectors.EVENT_WRITE if name == "in" else selectors.EVENT_READ
            self.selector.register(fd, event, lambda _, name=name: self.pump(call, name))
        return call

    def pump(self, call: Call, name: str) -> bool:
        """Moves what one pipe has and says whether there may be more; a closed pipe leaves the selector."""
        fd = call.pipes.get(name)
        if fd is None:
            return False  # closed by an event of the same round
        try:
            if name == "in":
                call.stdin = call.stdin[os.write(fd, call.stdin[:PIECE]) if call.stdin else 0 :]
                more = bool(call.stdin)
                if not more and isinstance(call, Talk) and call.open:
                    self.selector.unregister(fd)  # until there is more to say
                    return False
            else:
                data = os.read(fd, PIECE)
                more = bool(data)
                if call.result is None and data:
                    self.said(call, name, call.masked(name, data))
        except BlockingIOError:
            return False
        except OSError:
            more = False
        if not more and name == "out" and call.result is None and isinstance(call, Talk) and call.terminal:
            if fd in self.selector.get_map():  # stays open: who has closed its terminal is about to end, by itself
                self.selector.unregister(fd)
        elif not more:
            self.close_pipe(call, name)
        return more

    def said(self, call: Call, stream: str, data: bytes) -> None:
        head = call.capture(stream, data)
        if head:
            self.publish(call, {"stream": stream}, head)
        self.heard(call)

    def close_pipe(self, call: Call, name: str) -> None:
        fd = call.pipes.pop(name, None)
        if fd is not None:
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            os.close(fd)

    def publish(self, call: Call, header: Json, body: bytes = b"") -> None:
        for connection, number in list(call.subscribers):
            try:
                connection.send({"id": number, **header}, body)
                self.rearm(connection)
            except Broken:
                self.drop(connection)

    def news(self, call: Call) -> None:
        """What a shepherd says: how its tool ended, or that nothing of the call is left; or it died without a word."""
        try:
            said = call.shepherd.line.recv(END.size)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                return
            said = b""
        if len(said) == END.size:
            self.ended(call, *END.unpack(said))
        elif len(said) == PID.size:
            call.main = PID.unpack(said)[0]  # it took its time
        elif said == b".":
            self.leave(call)
            if self.spare is None:
                self.spare = call.shepherd
            else:
                self.let_go(call.shepherd)
        else:
            self.bury(call)

    def leave(self, call: Call) -> None:
        """Nothing of the call runs any more."""
        self.shepherds.pop(call.shepherd.pid, None)
        self.selector.unregister(call.shepherd.line)
        for name in ("out", "err"):
            self.close_pipe(call, name)

    def let_go(self, shepherd: Shepherd) -> None:
        """It ends when it sees that nobody talks to it; until then it is no stray."""
        self.going.add(shepherd.pid)
        shepherd.line.close()

    def bury(self, call: Call) -> None:
        """A shepherd was killed, by its own tool: the orphans are ours now and must not stay."""
        if self.shepherds.get(call.shepherd.pid) is not call:
            return
        with suppress(OSError):
            while len(said := call.shepherd.line.recv(END.size)) == END.size:
                self.ended(call, *END.unpack(said))
        if call.result is None:
            self.ended(call, signal.SIGKILL, False)
        self.leave(call)
        call.shepherd.line.close()
        if self.strays():
            kill(self.strays)

    def make_spare(self) -> None:
        """Where there is no room for it now, a call will find out for itself."""
        with suppress(Refused):
            self.spare = self.spare or Shepherd(self.config)

    def ours(self) -> set[int]:
        """Processes that are no tool's."""
        return {os.getpid(), *self.shepherds, *self.going, *([self.spare.pid] if self.spare else [])}

    def strays(self) -> set[int]:
        table = processes()
        return below(self.ours(), table) - below(set(self.shepherds), table)

    def ended(self, call: Call, status: int, leaves: bool) -> None:
        """The tool itself is over. What it left running ends with it, unless it was asked for: then it lives on below
        its shepherd, its output thrown away."""
        background = len(self.tree(call) if call.keeps else kill(lambda: self.tree(call))) if leaves else 0
        self.close_pipe(call, "in")
        for name in ("out", "err"):
            for _ in range(32):  # more than a pipe holds: a background writer must not keep us here
                if name not in call.pipes or not self.pump(call, name):
                    break
        for name, mask in call.masks.items():
            if mask.held:
                self.said(call, name, mask.rest())
        for stream, data in call.close_output():
            self.publish(call, {"stream": stream}, data)
        killed, code = os.WIFSIGNALED(status), os.WEXITSTATUS(status)
        reason = call.reason or ("signal" if killed else "exit")
        if call.reason is None and (killed or code) and self.oom_kills() > call.oom_before:
            reason = "oom"
        call.end(reason, os.WTERMSIG(status) if killed else code, background)
        call.stdin = memoryview(b"")
        self.publish(call, {"result": call.result})
        call.subscribers = []
        self.heard(call)
        self.trim()

    def trim(self) -> None:
        """Old calls lose their output, never their result: a key is remembered as long as the sandbox lives."""
        done = [call for call in self.calls.values() if call.result is not None]
        total = sum(call.captured for call in done)
        for call in done:
            if total <= JOURNAL_BYTES:
                return
            total -= call.captured
            call.forget()

    def op_lookup(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        call = self.calls.get(header["key"])
        paused = self.paused_at is not None
        if call is None:
            return {"state": "unknown", "paused": paused}, b""
        output = call.output() if header.get("output", True) else b""
        if call.result is None:
            since = time.monotonic() - call.started
            return {"state": "running", "elapsed_s": since, "argv": call.argv, "paused": paused}, output
        return {"state": "finished", "result": call.result}, output

    def tree(self, call: Call) -> set[int]:
        return below({call.shepherd.pid}, processes())

    def everything(self) -> set[int]:
        return below(self.ours(), processes())

    def end_tree(self, call: Call, reason: str) -> list[int]:
        if call.result is None and call.reason is None:
            call.reason = reason
        killed = kill(lambda: self.tree(call))
        send_signal(call.shepherd.pid, signal.SIGCONT)  # its tool may have stopped it, and it has an end to report
        return killed

    def op_kill(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Ends a call; with `since`, only what its tool has begun since the write of that name was taken."""
        call = self.calls.get(header["key"])
        if call is None or self.shepherds.get(call.shepherd.pid) is not call:
            return {"killed": []}, b""
        if header.get("since") is None:
            return {"killed": self.end_tree(call, "signal")}, b""
        old = call.written.get(header["since"]) if isinstance(call, Talk) else None
        if old is None:
            raise Refused("request", f"the call {call.key!r} was never written {header['since']!r}")
        main = {call.main}
        return {"killed": kill(lambda: younger(call.shepherd.pid, old - main) - main)}, b""

    def kill_all(self) -> list[str]:
        names = [name_of(pid) for pid in sorted(self.everything())]
        for call in self.shepherds.values():
            call.reason = call.reason or "signal"
        kill(self.everything)
        for pid in self.shepherds:
            send_signal(pid, signal.SIGCONT)
        return names

    def oom_kills(self) -> int:
        """How often the kernel's memory limit has killed in here; 0 where nobody counts."""
        for fd in self.oom_counters:
            with suppress(OSError):
                for line in os.pread(fd, 4096, 0).splitlines():
                    if line.startswith(b"oom_kill "):
                        return int(line.split()[1])
        return 0


def counter(place: int | str) -> int | None:
    """A descriptor of the file that counts: inherited, or opened; None where there is no such file."""
    try:
        return place if isinstance(place, int) else os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
