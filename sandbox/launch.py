"""Small parts that every driver's start needs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from .driver import Driver
from .errors import BadSpec, CreateFailed, SandboxError
from .spec import Handle, SandboxSpec


def refuse_image(spec: SandboxSpec, backend: str) -> None:
    """For backends that have only the built-in image. Raises BadSpec."""
    if spec.image is not None:
        raise BadSpec(f"the image {spec.image!r} cannot be used: images by name need Docker, and this is {backend}")


def listen(path: Path) -> socket.socket:
    """A listening unix socket at a path of any length, for us alone."""
    sock = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.chmod(path, 0o600)
        sock.listen(16)
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def pipe_with(data: bytes) -> int:
    """The reading end of a pipe that holds `data`; it must fit (64 KiB)."""
    reader, writer = os.pipe()
    with open(writer, "wb") as f:
        f.write(data)
    return reader


async def confirmed(driver: Driver, handle: Handle, log: Path) -> Handle:
    """The handle, if its agent answers; else nothing of the sandbox is left, and CreateFailed."""
    try:
        await (await driver.attach(handle)).close()
    except SandboxError as error:
        said = last_words(log)
        await driver.release(handle)
        raise CreateFailed(f"the agent of {handle.sandbox_id} is silent: {error} {said}".rstrip()) from error
    return handle


def last_words(log: Path) -> str:
    """The end of what a process printed before it went."""
    return log.read_text(errors="replace").strip()[-500:] if log.exists() else ""
