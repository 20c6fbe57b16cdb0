"""Attempts to get out of a sandbox, to reach into it, or to take more than it was given.

An attempt is a short Python text. It runs inside as a tool call, returns what it got or nothing, and may raise OSError
where it was refused. Whoever can be asked outside is asked too: what `Witness` has seen counts more than what the
attempt says of itself. A text that fails in any other way is broken, and a broken attempt counts as one that got out.

`control` says where nothing of ours isolates and the same text must succeed, so that a text which can never succeed
is found: as root with every capability and no filter in namespaces of its own ("root"), or as a plain root process of
this machine ("host"). Attempts without a control say why.
"""

from __future__ import annotations

import json
import textwrap
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from sandbox import Sandbox, SandboxError
from tests.sandbox.witness import Witness

PRELUDE = '''
import ctypes, errno, fcntl, glob, hashlib, json, mmap, os, re, resource, signal, socket, stat, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
HOST = json.loads(sys.argv[1])

def call(function, *arguments):
    """A function of the C library, or a system call by its name or number: what it gives. Raises OSError."""
    ctypes.set_errno(0)
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if function in HOST["numbers"] or isinstance(function, int):
        got = libc.syscall(ctypes.c_long(HOST["numbers"].get(function, function)), *values)
    else:
        got = getattr(libc, function)(*values)
    if got == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got

def reached(function, *arguments):
    """Whether the kernel looked at the arguments at all: any answer but a refusal to listen. They make no sense."""
    try:
        return f"{function} gave {call(function, *arguments)}"
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            raise
        return f"{function} looked and said {errno.errorcode[error.errno]}"

def opened(paths, flags=os.O_RDONLY):
    """Those that can be opened. Nothing is written to them."""
    got = []
    for path in paths:
        try:
            os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK))
            got.append(path)
        except OSError:
            pass
    return got

def secrets_in(paths):
    """Those that hold a secret of the host or of another sandbox."""
    got = []
    for path in paths:
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            with open(path, "rb") as f:
                found = re.findall(rb"canary-[0-9a-f]{32}", f.read(1 << 20))
        except OSError:
            continue
        if any(hashlib.sha256(one).hexdigest() in HOST["secrets"] for one in found):
            got.append(path)
    return got

def attempt():
'''
EPILOGUE = """
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        said = {"got": str(got) if (got := attempt()) else "", "why": "nothing there"}
    except OSError as error:
        said = {"got": "", "why": errno.errorcode.get(error.errno, str(error))}
    os.write(writer, json.dumps(said).encode())
    os._exit(0)
os.close(writer)
said = os.read(reader, 65536)
status = os.waitpid(pid, 0)[1]
if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGSYS):
    said = json.dumps({"got": "", "why": f"killed by signal {os.WTERMSIG(status)}"}).encode()
print(said.decode())  # nothing at all where it died of a mistake of its own
"""
Control = Literal["root", "host"]


@dataclass(frozen=True)
class Outcome:
    """`got` is empty where the attempt failed, which is as it should be; `why` is then what stopped it."""

    name: str
    got: str
    why: str

    @property
    def held(self) -> bool:
        return not self.got


@dataclass(frozen=True)
class Escape:
    """`drive` is for attempts on the controller: it acts outside while the text runs inside, and says what it got."""

    name: str
    text: str
    control: Control | None = None
    uncontrolled: str = ""  # why there is no control
    drive: Callable[[Sandbox], Awaitable[str]] | None = None
    timeout_s: float = 30.0

    @property
    def script(self) -> str:
        return PRELUDE + textwrap.indent(textwrap.dedent(self.text).strip("\n"), "    ") + EPILOGUE

    def argv(self, witness: Witness) -> list[str]:
        return ["python3", "-c", self.script, json.dumps(witness.facts)]


def told(escape: Escape, output: bytes, witness: Witness) -> Outcome:
    """What an attempt's own words and the witness come to."""
    try:
        said = json.loads(output.decode(errors="replace").strip().splitlines()[-1])
        got, why = said["got"], said["why"]
    except (ValueError, IndexError, KeyError, TypeError):
        got, why = f"the attempt is broken: {output.decode(errors='replace').strip()[-300:]!r}", ""
    return Outcome(escape.name, "; ".join([*witness.seen(), *([got] if got else [])]), why)


async def attempt(sandbox: Sandbox, escape: Escape, witness: Witness) -> Outcome:
    """Runs one attempt in a sandbox, and sees that its agent still answers afterwards."""
    try:
        call = await sandbox.start(f"escape-{uuid.uuid4().hex}", escape.argv(witness), timeout_s=escape.timeout_s)
        driven = await escape.drive(sandbox) if escape.drive is not None else ""
        result = await call.result()
        if driven:
            return Outcome(escape.name, driven, "")
        if result.reason != "exit" and not result.output:
            outcome = Outcome(escape.name, "; ".join(witness.seen()), f"ended as {result.reason}")
        else:
            outcome = told(escape, result.output, witness)
        await sandbox.killall()
    except SandboxError as error:
        return Outcome(escape.name, f"the sandbox no longer answers: {error}", "")
    return outcome


def every_escape() -> tuple[Escape, ...]:
    from tests.sandbox import escapes_files, escapes_host, escapes_kernel, escapes_mounts, escapes_processes

    modules = (escapes_mounts, escapes_processes, escapes_kernel, escapes_files, escapes_host)
    return tuple(escape for module in modules for escape in module.ESCAPES)
