"""The home of an installation: who holds it, what its files say, and how they are written."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from runtime.errors import StartupError
from runtime.settings import Settings


@contextlib.contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Holds the lock of this home. Raises StartupError where somebody else does, or it cannot be used."""
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(settings.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"TENUTO_HOME is {settings.home}, which cannot be used: {error.strerror}") from error
    try:
        _take(settings, fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_alone(settings: Settings) -> None:
    """Raises StartupError where a stack is up on this home. Makes nothing, and holds nothing afterwards."""
    try:
        fd = os.open(settings.lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _take(settings, fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _take(settings: Settings, fd: int, how: int) -> None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        state = read_state(settings.state_path)
        raise StartupError(
            f"Tenuto is already up on {settings.home}: process {state.get('pid', 'unknown')}"
            f" at {state.get('api_url') or 'an address not known yet'}; stop it, or choose another TENUTO_HOME"
        ) from None


def orphans(state_path: Path) -> list[psutil.Process]:
    """Children of an `up` that was killed: they get their signal at once, but need a moment to go."""
    pids = [pid for pid in read_state(state_path).get("processes", {}).values() if isinstance(pid, int)]
    return [process for pid in pids if (process := _orphan(pid)) is not None]


def _orphan(pid: int) -> psutil.Process | None:
    """The process, if it is one that lost its parent; a pid that was given to another process is not."""
    try:
        process = psutil.Process(pid)
        return process if process.ppid() in (0, 1) else None
    except psutil.Error:
        return None


def read_state(path: Path) -> dict[str, Any]:
    """up.json, or nothing where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, for us only. Raises OSError."""
    temp = path.with_suffix(path.suffix + ".tmp")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        temp.replace(path)
    except OSError:
        temp.unlink(missing_ok=True)
        raise


def make_admin_key(path: Path) -> None:
    """`tk_` and 32 characters, once."""
    if not path.exists():
        try:
            write_private(path, f"tk_{secrets.token_urlsafe(24)}\n")
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def make_secrets_key(path: Path) -> None:
    """32 random bytes in base64, once. Whatever was sealed with them opens with no others."""
    if not path.exists():
        try:
            write_private(path, base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def private_dir(path: Path) -> None:
    """A directory of ours under a place that others can write to; one that somebody else made is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StartupError(f"{path} exists and belongs to somebody else; remove it")
        path.chmod(0o700)
    except OSError as error:
        raise StartupError(f"{path} cannot be made: {error.strerror}") from error
