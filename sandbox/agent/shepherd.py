"""The processes under which calls run. Each is a child of the agent and a subreaper: what a tool leaves behind (setsid,
double forks) is handed to it by the kernel, so the processes of a call are always one tree below it. It cannot be read
or traced by any of them, as its parent cannot: that is inherited by fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .calls import Call
from .errors import Refused
from .processes import send_signal

PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031  # the fcntl module names it from 3.10 on
TIOCSWINSZ = 0x5414
ORDER_BYTES, PIPE_BYTES = 1 << 20, 1 << 16  # what a pipe can be made to take without being read, and what it takes
PID, END = struct.Struct("=i"), struct.Struct("=i?")  # END: how the tool ended, and whether anything of the call lives
MOST_FILES = 1 << 14
RESERVED = 384  # descriptors that no call takes: for connections, and for looking at processes and files
STARTS, NOT_STARTED = b"!", b"?"
NO_ROOM = "no process can be started: the sandbox is at its process limit"
LIBC = ctypes.CDLL(None, use_errno=True)
Json = dict[str, Any]


class Shepherd:
    """A process under which one call at a time runs. Forking is most of what a call costs, so it is there before the
    call, and takes the next one when every process of the last is gone. `line` is how it is told and how it tells.
    """

    def __init__(self, config: Json) -> None:
        """Raises Refused where there is no room for a process."""
        try:
            self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            raise Refused("busy", NO_ROOM) from None
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

    def start(self, order: bytes, terminal: Sequence[int] | None) -> tuple[int, dict[str, int]] | None:
        """The tool's pid and the agent's ends of its pipes, when its process exists; None where a tool of another call
        has killed us, or there is no room for one more. `terminal`: the rows and columns of one, instead of pipes."""
        names = ("order", *(() if terminal else ("in", "out", "err")))
        if not is_room(2 * len(names)):
            return None
        pipes = {name: os.pipe() for name in names}
        ours = {name: pair[name in ("order", "in")] for name, pair in pipes.items()}
        theirs = [pair[name not in ("order", "in")] for name, pair in pipes.items()]
        name = ""
        if terminal:
            ours["out"], slave = os.openpty()
            ours["in"] = os.dup(ours["out"])
            theirs.append(slave)
            resize(slave, terminal)
            name = os.ttyname(slave)
        try:
            os.set_blocking(ours["order"], False)
            if len(order) > PIPE_BYTES:
                fcntl.fcntl(ours["order"], F_SETPIPE_SZ, ORDER_BYTES)
            if os.write(ours["order"], order) == len(order):
                socket.send_fds(self.line, [b"!" + name.encode()], theirs)
        except OSError:
            pass  # no word will come
        finally:
            close([ours.pop("order"), *theirs])
        pid = self._hears()  # 0: it may have started, and nobody can tell how it is called
        if pid is not None:
            return pid, ours
        close(ours.values())
        return None

    def _hears(self) -> int | None:
        """Waits for the pid of the tool, which has started. A tool of another call may have stopped us; the tool itself
        may have killed us before we could say its pid, and must not run again."""
        ready = select.poll()
        ready.register(self.line, select.POLLIN)
        nothing: int | None = None
        for _ in range(100):
            if ready.poll(20):
                said = heard(self.line)
                if len(said) == PID.size:
                    return int(PID.unpack(said)[0])
                if said != STARTS:
                    return None if said else nothing
                nothing = 0
            else:
                send_signal(self.pid, signal.SIGCONT)
        return nothing


def heard(line: socket.socket) -> bytes:
    """The next word of a shepherd; nothing where it is gone, which is a reset if it had not read all of ours."""
    try:
        return line.recv(PID.size)
    except ConnectionResetError:
        return b""


def launch(call: Call, request: Json, cwd: str, shepherd: Shepherd, config: Json) -> None:
    """Starts the tool; fills in `call.shepherd` and `call.pipes`.

    Returns when the tool's process exists below its shepherd, so that no kill can come between the two. Raises Refused
    where there is no room for either.
    """
    order = json.dumps([request["argv"], {**request["env"], **request.get("secrets", {})}, cwd]).encode()
    if len(order) > ORDER_BYTES:
        raise Refused("request", f"the command and its environment have over {ORDER_BYTES} bytes: put it in a file")
    started = shepherd.start(order, request.get("terminal"))
    if started is None:
        retire(shepherd)
        shepherd = Shepherd(config)
        started = shepherd.start(order, request.get("terminal"))
        if started is None:
            retire(shepherd)
            raise Refused("busy", NO_ROOM)
    call.shepherd, (call.main, call.pipes) = shepherd, started
    for fd in call.pipes.values():
        os.set_blocking(fd, False)


def make_room() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 <= hard < MOST_FILES else MOST_FILES, hard))


def is_room(count: int) -> bool:
    """Whether so many descriptors can be had, and enough stay for what must go on whatever tools do."""
    try:
        last = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return False
    os.close(last)
    return last + count + RESERVED < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def retire(shepherd: Shepherd) -> None:
    send_signal(shepherd.pid, signal.SIGKILL)
    shepherd.line.close()


def resize(terminal: int, size: Sequence[int]) -> None:
    rows, columns = size
    fcntl.ioctl(terminal, TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def herd(line: socket.socket, config: Json) -> NoReturn:
    """Runs in the child: starts the tools it is told to, one after another, and reaps all that they leave behind. Says
    of each that it starts, its pid, an END, and "." when nothing of it is left."""
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
            message, fds, _, _ = socket.recv_fds(line, 64, 4)
            if not message:
                os._exit(0)  # the agent has no more use for us, or is gone
            tend(line, message[1:].decode(), *fds)
    finally:
        os._exit(1)


def tend(line: socket.socket, terminal: str, order: int, *stdio: int) -> None:
    with open(order, "rb") as f:
        argv, env, cwd = json.load(f)
    for fd in stdio:
        os.set_inheritable(fd, False)
    line.send(STARTS)  # from now on nobody else may start it
    try:
        main = tool(argv, env, cwd, stdio, terminal)
    except BaseException:
        line.send(NOT_STARTED)
        raise
    close(stdio)
    line.send(PID.pack(main))
    if main <= 0:
        line.send(END.pack(-main << 8, False))
    with suppress(ChildProcessError):
        while True:
            pid, code = os.wait()
            if pid == main:
                line.send(END.pack(code, not reaped()))
    line.send(b".")


def reaped() -> bool:
    """Whether none of our children lives; what has ended of them is gone after this."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return False
    return True


def close_all_but(keep: int) -> None:
    top = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(0, keep)
    os.closerange(keep + 1, min(top, 1 << 16))


def tool(argv: list[str], env: Mapping[str, str], cwd: str, stdio: Sequence[int], terminal: str) -> int:
    """Starts the tool in a session of its own: its pid, or minus the code that a shell would return for the failure.

    posix_spawn does not copy this process. Every descriptor but the three is closed by exec. Without room for one more
    process it raises, and the agent, which waits for a word, sees the end of the line. A terminal that is opened first
    in the session is the one that controls it.
    """
    message, code = "", 126
    try:
        os.chdir(cwd)
        os.environ["PATH"] = env.get("PATH", os.defpath)  # where posix_spawnp looks
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
        if terminal:
            actions = [(os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
        return os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True)
    except BlockingIOError:
        raise
    except FileNotFoundError:
        found = os.path.isdir(cwd)
        message, code = (f"{argv[0]}: not found", 127) if found else (f"{cwd}: no such directory", 126)
    except BaseException as error:
        message = f"{argv[0]}: {error}"
    os.write(stdio[-1], (message + "\n").encode(errors="replace"))
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
