"""Calls: their journal, their captured output, and the shepherd that starts each of them.

A shepherd is a child of ours that is a subreaper: what the tool leaves behind (setsid, double forks) is handed to it
by the kernel, so the processes of a call are always one tree below it.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import Refused

PR_SET_CHILD_SUBREAPER = 36
PIECE = 1 << 16
TAIL_BYTES = 8 << 10
LIBC = ctypes.CDLL(None, use_errno=True)
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
        self.shepherd = 0
        self.pipes: dict[str, int] = {}
        self.chunks: list[tuple[str, bytes]] = []
        self.captured = 0
        self.tail: list[tuple[str, bytes]] = []
        self.totals = {"out": 0, "err": 0}
        self.reason: str | None = None  # why we ended it, where we did
        self.oom_before = 0
        self.result: Json | None = None
        self.subscribers: list[tuple[Any, int]] = []

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

    def end(self, reason: str, code: int | None) -> None:
        total = self.totals["out"] + self.totals["err"]
        kept = sum(len(data) for stream, data in self.chunks if stream != "note")
        self.result = {
            "reason": reason,
            "code": code,
            "stdout_bytes": self.totals["out"],
            "stderr_bytes": self.totals["err"],
            "truncated": kept < total,
            "duration_s": time.monotonic() - self.started,
        }


def launch(call: Call, request: Json, cwd: str, config: Json) -> None:
    """Starts the shepherd and the tool; fills in `call.shepherd` and `call.pipes`.

    Returns when the tool's process exists below its shepherd, so that no kill can come between the two. Raises Refused
    where there is no room for either.
    """
    ends = {name: os.pipe() for name in ("in", "out", "err", "status")}
    try:
        call.shepherd = os.fork()
    except OSError:
        call.shepherd = 0
        _give_up(ends)
    if call.shepherd == 0:
        shepherd(call.argv, request, cwd, config, ends)
    for name, (reader, writer) in ends.items():
        ours, theirs = (writer, reader) if name == "in" else (reader, writer)
        os.close(theirs)
        call.pipes[name] = ours
    if os.read(call.pipes["status"], 1) != b"+":
        _give_up({name: (fd,) for name, fd in call.pipes.items()})
    for fd in call.pipes.values():
        os.set_blocking(fd, False)


def _give_up(ends: Mapping[str, tuple[int, ...]]) -> NoReturn:
    for fds in ends.values():
        for fd in fds:
            os.close(fd)
    raise Refused("busy", "no process can be started: the sandbox is at its process limit")


def shepherd(argv: list[str], request: Json, cwd: str, config: Json, ends: dict[str, tuple[int, int]]) -> NoReturn:
    """Runs in the child: starts the tool, reports how it ended, and reaps all that it leaves behind."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        stdio = (ends["in"][0], ends["out"][1], ends["err"][1])
        status = ends["status"][1]
        main = os.fork()
        if main == 0:
            tool(argv, request, cwd, config, stdio)
        os.write(status, b"+")
        close_all_but(status)
        while True:
            try:
                pid, code = os.wait()
            except ChildProcessError:
                os._exit(0)
            if pid == main:
                os.write(status, struct.pack("i", code))
    finally:
        os._exit(1)


def close_all_but(keep: int) -> None:
    top = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(0, keep)
    os.closerange(keep + 1, min(top, 1 << 16))


def tool(argv: list[str], request: Json, cwd: str, config: Json, stdio: tuple[int, int, int]) -> NoReturn:
    """Runs in the tool's own process, up to exec."""
    message = ""
    try:
        os.setsid()
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        os.closerange(3, 1 << 16)
        os.chdir(cwd)
        set_limits(config["limits"])
        os.nice(config["nice"])  # the agent must get its turn among a thousand busy tools
        os.execvpe(argv[0], argv, request["env"])
    except FileNotFoundError:
        message = f"{argv[0]}: not found" if os.path.isdir(cwd) else f"{cwd}: no such directory"
    except BaseException as error:
        message = f"{argv[0]}: {error}"
    os.write(2, (message + "\n").encode(errors="replace"))
    os._exit(127 if message.endswith("not found") else 126)
    sys.exit()  # for the type checker; never reached


def set_limits(limits: Json) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.get("files", 1024),
        resource.RLIMIT_NPROC: limits.get("nproc"),
        resource.RLIMIT_DATA: limits.get("data"),
    }
    for which, value in wanted.items():
        if value is not None:
            hard = resource.getrlimit(which)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(which, (value, value))
