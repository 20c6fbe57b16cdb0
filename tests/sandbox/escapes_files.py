"""Attempts with files: the image, volumes, links under the controller's feet, and memory that looks like a file."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sandbox import BadPath, FileMissing, OperationFailed, Sandbox, SandboxError
from tests.sandbox.escapes import Escape

ROUNDS = 60
SWAP = """
os.makedirs("race/real", exist_ok=True)
os.makedirs("/tmp/target", exist_ok=True)
open("/tmp/target/file", "w").write("outside")
open("race/real/file", "w").write("inside")
open("race/plain", "w").write("inside")
os.symlink("/proc/self/environ", "race/link")
open("laid", "w").close()
while not os.path.exists("stop"):
    for name, other in (("race/d", "/tmp/target"),):
        os.symlink(other, name); os.unlink(name); os.rename("race/real", name); os.rename(name, "race/real")
    os.symlink("/tmp/target/file", "race/f"); os.unlink("race/f")
    os.link("race/plain", "race/f"); os.unlink("race/f")
"""


async def begun(sandbox: Sandbox) -> None:
    """Waits for the attempt inside to say that its links are laid."""
    while True:
        with suppress(FileMissing):
            await sandbox.get("laid")
            return


async def race_put(sandbox: Sandbox) -> str:
    """Writes below a folder that is a link every other moment; nothing may appear where the link leads."""
    await begun(sandbox)
    for number in range(ROUNDS):
        with suppress(BadPath, FileMissing, OperationFailed):
            await sandbox.put(f"race/d/put-{number}", b"x")
    await sandbox.put("stop", b"")
    return ""


async def race_get(sandbox: Sandbox) -> str:
    """Reads a file that is a link every other moment; what it leads to may not come."""
    got = ""
    await begun(sandbox)
    for _ in range(ROUNDS):
        for path in ("race/d/file", "race/f", "race/link"):
            with suppress(BadPath, FileMissing, OperationFailed):
                if await sandbox.get(path) != b"inside":
                    got = f"{path} was read through a link"
    await sandbox.put("stop", b"")
    return got


async def plain_links(sandbox: Sandbox) -> str:
    got = []
    await begun(sandbox)
    for path in ("links/passwd", "links/up/etc/passwd", "links/self", "../etc/passwd", "/etc/passwd", "links/fifo"):
        for do in (sandbox.get(path), asyncio.ensure_future(sandbox.put(f"{path}/new", b"x"))):
            try:
                await do
                got.append(path)
            except SandboxError:
                pass
    await sandbox.put("stop", b"")
    return ", ".join(got)


WAIT = 'open("laid", "w").close()\nwhile not os.path.exists("stop"):\n    pass\n'
CLEAN = """
for name in ("laid", "stop"):
    if os.path.exists(name):
        os.unlink(name)
"""
ACTS_OUTSIDE = "it attacks our own controller"

ESCAPES = (
    Escape(
        "write a program of the image",
        """
        names = ("usr/bin/bash", "usr/bin/cat", "etc/passwd", "usr/lib/tenuto/agent/server.py")
        return opened([f"/{name}" for name in names], os.O_WRONLY)
        """,
        "root",
    ),
    Escape(
        "put a file beside the agent",
        """
        got = []
        for folder in ("/usr/lib/tenuto", "/usr/lib/tenuto/agent", "/usr/bin", "/etc", "/", "/run/tenuto", "/lib"):
            try:
                os.mknod(f"{folder}/planted", 0o644)
                got.append(folder)
            except OSError:
                pass
        return got
        """,
        "root",
    ),
    Escape("give an image's file another mode", 'os.chmod("/usr/bin/bash", 0o4755)\nreturn "changed"', "root"),
    Escape(
        "race a link against an upload",
        CLEAN + SWAP + 'return [name for name in os.listdir("/tmp/target") if name.startswith("put-")]',
        None,
        ACTS_OUTSIDE,
        race_put,
    ),
    Escape("race a link against a download", CLEAN + SWAP, None, ACTS_OUTSIDE, race_get),
    Escape(
        "lead the controller through links",
        CLEAN
        + """
os.makedirs("links")
os.symlink("/etc/passwd", "links/passwd")
os.symlink("../../..", "links/up")
os.symlink("/proc/self", "links/self")
os.mkfifo("links/fifo")
"""
        + WAIT,
        None,
        ACTS_OUTSIDE,
        plain_links,
    ),
    Escape(
        "follow a link out of a volume",
        """
        os.symlink(HOST["file"], "/mnt/open/link")
        try:
            got = secrets_in(["/mnt/open/link"])
        finally:
            os.unlink("/mnt/open/link")
        return got
        """,
        None,
        "a link is followed where it is read, so the host would follow it",
    ),
    Escape(
        "climb out of a volume",
        """
        there = os.open("/mnt/open", os.O_RDONLY)
        return [name for name in os.listdir(f"/proc/self/fd/{there}/../..") if name in ("home", "root", "boot", "srv")]
        """,
        None,
        "it is climbed out of on the host by the same words",
    ),
    Escape(
        "write a volume that is shut",
        'open("/mnt/shut/planted", "w").close()\nreturn "written"',
        None,
        "an open volume beside it is written by the attempts before this one",
    ),
    Escape(
        "leave a program for the host that makes its runner root",
        """
        with open("/mnt/open/program", "wb") as f:
            f.write(b"#!/bin/sh\\n")
        os.chmod("/mnt/open/program", 0o4755)
        st = os.stat("/mnt/open/program")
        os.unlink("/mnt/open/program")
        return "a setuid program of root" if st.st_uid == 0 and st.st_mode & 0o4000 else ""
        """,
        None,
        "whose it is depends on who runs the sandbox",
    ),
    *(
        Escape(
            f"take more of {folder} than there is",
            f"""
            n = 0
            try:
                with open("{folder}/filler", "wb") as f:
                    for n in range(400):
                        f.write(bytes(1 << 20))
                        f.flush()
            except OSError:
                pass
            finally:
                os.unlink("{folder}/filler")
            return f"{{n}} MiB" if n > {limit} else ""
            """,
            None,
            "a disk has room",
        )
        for folder, limit in (("/work", 34), ("/tmp", 9), ("/dev/shm", 17))
    ),
    Escape(
        "keep memory in a file that has no name",
        """
        fd = os.memfd_create("x")
        for n in range(600):
            os.write(fd, bytes(1 << 20))
        return f"{n} MiB"
        """,
        None,
        "this machine has so much memory",
    ),
    Escape(
        "keep memory in segments that outlive their maker",
        """
        libc.shmat.restype = ctypes.c_void_p
        for n in range(600):
            at = libc.shmat(call("shmget", 0, 1 << 20, 0o1600), None, 0)
            ctypes.memset(at, 1, 1 << 20)
        return f"{n} MiB"
        """,
        None,
        "this machine has so much memory",
    ),
    Escape(
        "keep memory in messages",
        """
        message = struct.pack("l", 1) + bytes(8000)
        for n in range(600):
            queue = call("msgget", 0, 0o1600)
            for _ in range(2):
                call("msgsnd", queue, message, 8000, 0o4000)
        return f"{n} queues"
        """,
        None,
        "this machine has so much memory",
    ),
    Escape(
        "run a program that is not a file, as another user",
        """
        fd = os.memfd_create("x", 0)
        with open("/usr/bin/id", "rb") as f:
            os.write(fd, f.read())
        os.fchmod(fd, 0o6755)
        os.fchown(fd, 0, 0)
        return "owned by root"
        """,
        "root",
    ),
)
