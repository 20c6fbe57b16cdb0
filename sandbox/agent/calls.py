"""Calls: their journal, their captured output, and the shepherd that starts each of them.

A shepherd is a child of ours that is a subreaper: what the tool leaves behind (setsid, double forks) is handed to it
by the kernel, so the processes of a call are always one tree below it. It cannot be read or traced by any of them, as
its parent cannot: that is inherited by fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .errors import Refused
from .processes import send_signal

PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031  # the fcntl module names it from 3.10 on
PIECE = 1 << 16
TAIL_BYTES = 8 << 10
ORDER_BYTES, PIPE_BYTES = 1 << 20, 1 << 16  # what a pipe can be made to take without being read, and what it takes
NO_ROOM = "no process can be started: the sandbox is at its process limit"
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


class Shepherd:
    """A process under which one call at a time runs. Forking is most of what a call costs, so it is there before the
    call, and takes the next one when every process of the last is gone. `line` is how it is told and how it tells.
    """

    def __init__(self, config: Json) -> None:
        """Raises Refused where there is no room for a process."""
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        try:
            self.pid = os.fork()
        except OSError:
            self.line.close()
            raise Refused("busy", NO_ROOM) from None
        finally:
            if getattr(self, "pid", None) != 0:
                theirs.close()
        if self.pid == 0:
            herd(theirs, config)

    def start(self, order: bytes) -> dict[str, int] | None:
        """The agent's ends of the tool's pipes, when its process exists; None where a tool of another call has killed
        us, or there is no room for one more."""
        pipes = {name: os.pipe() for name in ("order", "in", "out", "err")}
        ours = {name: pair[name in ("order", "in")] for name, pair in pipes.items()}
        theirs = [pair[name not in ("order", "in")] for name, pair in pipes.items()]
        try:
            os.set_blocking(ours["order"], False)
            if len(order) > PIPE_BYTES:
                fcntl.fcntl(ours["order"], F_SETPIPE_SZ, ORDER_BYTES)
            if os.write(ours["order"], order) == len(order):
                socket.send_fds(self.line, [b"!"], theirs)
        except OSError:
            pass  # no word will come
        finally:
            close([ours.pop("order"), *theirs])
        if self._hears():
            return ours
        close(ours.values())
        return None

    def _hears(self) -> bool:
        """Waits for the word that the tool has started. A tool of another call may have stopped us."""
        ready = select.poll()
        ready.register(self.line, select.POLLIN)
        for _ in range(100):
            if ready.poll(20):
                return self.line.recv(1) == b"+"
            send_signal(self.pid, signal.SIGCONT)
        return False


def launch(call: Call, request: Json, cwd: str, shepherd: Shepherd, config: Json) -> None:
    """Starts the tool; fills in `call.shepherd` and `call.pipes`.

    Returns when the tool's process exists below its shepherd, so that no kill can come between the two. Raises Refused
    where there is no room for either.
    """
    order = json.dumps([call.argv, request["env"], cwd]).encode()
    if len(order) > ORDER_BYTES:
        raise Refused("request", f"the command and its environment have over {ORDER_BYTES} bytes: put it in a file")
    pipes = shepherd.start(order)
    if pipes is None:
        retire(shepherd)
        shepherd = Shepherd(config)
        pipes = shepherd.start(order)
        if pipes is None:
            retire(shepherd)
            raise Refused("busy", NO_ROOM)
    for fd in pipes.values():
        os.set_blocking(fd, False)
    call.shepherd, call.pipes = shepherd, pipes


def retire(shepherd: Shepherd) -> None:
    send_signal(shepherd.pid, signal.SIGKILL)
    shepherd.line.close()


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def herd(line: socket.socket, config: Json) -> NoReturn:
    """Runs in the child: starts the tools it is told to, one after another, reports how each ended ("+" it runs, four
    bytes of status, "." nothing of it is left), and reaps all that they leave behind."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        close_all_but(line.fileno())
        line.setblocking(True)
        set_limits(config["limits"])
        os.nice(config["nice"])  # the agent must get its turn among a thousand busy tools
        while True:
            message, fds, _, _ = socket.recv_fds(line, 1, 4)
            if not message:
                os._exit(0)  # the agent has no more use for us, or is gone
            tend(line, *fds)
    finally:
        os._exit(1)


def tend(line: socket.socket, order: int, *stdio: int) -> None:
    with open(order, "rb") as f:
        argv, env, cwd = json.load(f)
    main = tool(argv, env, cwd, stdio)
    close(stdio)
    line.send(b"+")
    if main <= 0:
        line.send(struct.pack("i", -main << 8))
    with suppress(ChildProcessError):
        while True:
            pid, code = os.wait()
            if pid == main:
                line.send(struct.pack("i", code))
    line.send(b".")


def close_all_but(keep: int) -> None:
    top = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(0, keep)
    os.closerange(keep + 1, min(top, 1 << 16))


def tool(argv: list[str], env: Mapping[str, str], cwd: str, stdio: Sequence[int]) -> int:
    """Starts the tool in a session of its own: its pid, or minus the code that a shell would return for the failure.

    posix_spawn does not copy this process. Every descriptor but the three is closed by exec. Without room for one more
    process it raises, and the agent, which waits for a word, sees the end of the line.
    """
    message, code = "", 126
    try:
        os.chdir(cwd)
        os.environ["PATH"] = env.get("PATH", os.defpath)  # where posix_spawnp looks
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
        return os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True)
    except BlockingIOError:
        raise
    except FileNotFoundError:
        found = os.path.isdir(cwd)
        message, code = (f"{argv[0]}: not found", 127) if found else (f"{cwd}: no such directory", 126)
    except BaseException as error:
        message = f"{argv[0]}: {error}"
    os.write(stdio[2], (message + "\n").encode(errors="replace"))
    return -code


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
