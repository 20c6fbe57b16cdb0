"""What stands outside of a sandbox and notices when something from inside touches it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sandbox import seccomp

CREATE = 0o1000
REMOVE = 0
LIBC = ctypes.CDLL(None, use_errno=True)


class Witness:
    """A file with a secret, a process with a secret, listening sockets of every kind and a piece of shared memory.

    `facts` is what an attempt may know of them; of a secret it knows the hash alone. `neighbour` is a secret that the
    caller puts into another sandbox.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret, self.neighbour = (f"canary-{secrets.token_hex(16)}" for _ in range(2))
        self.file = folder / "canary"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        folder.chmod(0o777)
        self.process = subprocess.Popen(["sleep", "10000"], env={"SECRET": self.secret}, cwd="/")
        self.tcp = [socket.create_server(("127.0.0.1", 0)), *_also_v6()]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0tenuto-{secrets.token_hex(8)}")
        self.abstract.listen()
        self.ours = [*self.tcp, self.udp, self.abstract]
        for sock in self.ours:
            sock.setblocking(False)
        self.shared_key = secrets.randbelow(2**30) + 1
        self.shared = LIBC.shmget(self.shared_key, 4096, CREATE | 0o666)
        self.hostname = os.uname().nodename

    @property
    def facts(self) -> dict[str, Any]:
        column = seccomp.ARCHITECTURES[os.uname().machine][1]
        table = {**seccomp.DENIED, "clone": seccomp.CLONE, "clone3": seccomp.CLONE3}
        return {
            "numbers": {name: pair[column] for name, pair in table.items() if pair[column] is not None},
            "machine": os.uname().machine,
            "secrets": [hashlib.sha256(each.encode()).hexdigest() for each in (self.secret, self.neighbour)],
            "file": str(self.file),
            "pid": self.process.pid,
            "tcp": [list(sock.getsockname()[:2]) for sock in self.tcp],
            "udp": list(self.udp.getsockname()),
            "abstract": self.abstract.getsockname().decode()[1:],
            "shared_key": self.shared_key,
            "disk": os.stat(self.folder).st_dev,
        }

    def seen(self) -> list[str]:
        """What has been touched since the last look."""
        found = []
        for sock in [*self.tcp, self.abstract]:
            with suppress(BlockingIOError):
                sock.accept()[0].close()
                found.append(f"a connection came to {sock.getsockname()!r}")
        with suppress(BlockingIOError):
            found.append(f"a datagram came: {self.udp.recv(100)!r}")
        if self.process.poll() is not None:
            found.append(f"a process of the host ended with {self.process.returncode}")
            self.process = subprocess.Popen(["sleep", "10000"], env={"SECRET": self.secret}, cwd="/")
        if not self.file.exists() or self.file.read_text() != self.secret:
            found.append("a file of the host was changed")
            self.file.write_text(self.secret)
        for path in self.folder.iterdir():
            if path != self.file:
                found.append(f"{path.name!r} was put into a folder of the host")
                path.unlink()
        if os.uname().nodename != self.hostname:
            found.append("the host has another name now")
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        LIBC.shmctl(self.shared, REMOVE, None)
        for sock in self.ours:
            sock.close()


def _also_v6() -> Iterator[socket.socket]:
    with suppress(OSError):
        yield socket.create_server(("::1", 0), family=socket.AF_INET6)


@contextmanager
def witness(folder: Path) -> Iterator[Witness]:
    made = Witness(folder)
    try:
        yield made
    finally:
        made.close()
