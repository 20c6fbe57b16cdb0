"""Temporary files named by the process that writes them, so that those of a killed one can be told and removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def prefix(kind: str) -> str:
    """For `tempfile`: names of this process."""
    return f".{kind}-{os.getpid()}-"


def sweep(directory: Path, kind: str) -> None:
    """Remove what dead processes left of a kind. What a living one writes is left alone."""
    for path in directory.glob(f".{kind}-*"):
        pid = path.name.removeprefix(f".{kind}-").partition("-")[0]
        if pid.isdigit() and Path(f"/proc/{pid}").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
