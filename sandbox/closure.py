"""Our interpreter as a folder that runs in any root of this architecture: `/.tenuto` in the images of users.

The loader of the image is not used, nor its libraries: ours is named on the command line, and where to look with it.
Python finds its library beside itself.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from . import image
from .errors import CreateFailed

HOME = "/.tenuto"


@dataclass(frozen=True)
class Closure:
    """`files`: path in a root -> file of the host. `words` start Python, `agent` is where the agent's package is."""

    files: dict[str, Path]
    words: tuple[str, ...]
    agent: str

    def add_to(self, tar: tarfile.TarFile) -> None:
        """Everything in it belongs to root, and folders come before what is in them."""
        folders: dict[str, None] = {}
        for path in self.files:
            parts = path.strip("/").split("/")
            folders |= dict.fromkeys("/".join(parts[:count]) for count in range(1, len(parts)))
        for folder in folders:
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, file in self.files.items():
            member = tarfile.TarInfo(path.strip("/"))
            st = file.stat()
            member.size, member.mode, member.mtime = (
                st.st_size,
                0o755 if st.st_mode & 0o100 else 0o644,
                int(st.st_mtime),
            )
            with open(file, "rb") as f:
                tar.addfile(member, f)


def of(built: image.Image) -> Closure:
    """The part of our image that the agent needs. Raises CreateFailed where it has no loader."""
    root = built.rootfs
    prefix = root / os.path.dirname(os.path.dirname(built.python)).lstrip("/")
    folders = [path.parent for path in prefix.glob("lib*/python3*/os.py")]
    folders += prefix.glob("lib64/python3*/lib-dynload")
    library = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    agent = root / image.AGENT_HOME.lstrip("/")
    binaries = [root / built.python.lstrip("/"), *(path for path in library if path.suffix == ".so")]
    shared = image.libraries_in(root, binaries)
    loader = next((path for path in shared if path.name.startswith("ld-")), None)
    if loader is None:
        raise CreateFailed(f"{built.python} is linked to no loader, so it cannot be brought into another image")
    every = [binaries[0], *library, *shared, *(path for path in sorted(agent.rglob("*")) if path.is_file())]
    files = {_at(root, path): path for path in every}
    places = ":".join(dict.fromkeys(os.path.dirname(_at(root, path)) for path in shared))
    quiet = () if "musl" in loader.name else ("--inhibit-cache",)
    words = (_at(root, loader), *quiet, "--library-path", places, _at(root, binaries[0]))
    return Closure(files, words, HOME + image.AGENT_HOME)


def _at(root: Path, path: Path) -> str:
    return f"{HOME}/{path.relative_to(root)}"
