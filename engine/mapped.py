"""Model files as memory. No numpy."""

from __future__ import annotations

import mmap
from pathlib import Path

from engine.errors import ModelFileError


def map_file(path: Path, kind: str) -> mmap.mmap:
    """A whole file, to be read. Raises ModelFileError where it is empty or cannot be; `kind`: what was expected."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelFileError(f"{path} is empty; a {kind} file was expected") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
