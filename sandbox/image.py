"""A root filesystem from what the host has: its own Python, a shell, the usual tools, and the libraries they need.

No registry is asked. The image is named by the hash of its contents, built once into `images/<hash>` (temporary name,
then rename) and never changed. Everything in it is world-readable and belongs to whoever built it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CreateFailed

RECIPE = "3"
READABLE = 0o022  # the umask of what is made in the image: tools run as others than who makes it
AGENT_SOURCE = Path(__file__).parent / "agent"
AGENT_HOME = "/usr/lib/tenuto"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SKIPPED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils", "site-packages"}
SKIPPED |= {"dist-packages", "__pycache__"}
MERGED = ("bin", "sbin", "lib", "lib64")
PROGRAM_NAMES = """
    awk base64 basename bash bc cat chmod cmp comm cp cut date dd df diff dirname du echo env expand expr false file
    find fold git grep gunzip gzip head hostname id join jq kill less ln ls make md5sum mkdir mkfifo mktemp mv nl nohup
    nproc od paste patch pgrep printenv printf ps pwd readlink realpath rev rm rmdir sed seq setsid sha1sum sha256sum
    shuf sleep sort split stat tac tail tar tee test timeout touch tr tree true truncate uname uniq unzip wc which
    whoami xargs xxd xz yes zip
"""
# What a wheel takes for granted, for libraries that a volume brings; glibc itself opens the first at a thread's end.
WHEELS = "libgcc_s.so.1 libstdc++.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libutil.so.1 libresolv.so.2"
PROGRAMS = re.findall(r"\S+", PROGRAM_NAMES)
TEXTS = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/work:/bin/bash\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
FOLDERS = ("dev", "etc", "mnt", "proc", "run", "run/tenuto", "sys", "tmp", "usr", "var/tmp", "work")
QUESTION = """
import json, sysconfig
try:
    from ssl import get_default_verify_paths
    certificates = get_default_verify_paths().openssl_cafile
except ImportError:
    certificates = "/etc/ssl/cert.pem"
print(json.dumps([certificates, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]))
"""
# Whom a tool trusts that may speak https with the world: what this host trusts.
CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


@dataclass(frozen=True)
class Image:
    """`rootfs` is the tree, `digest` the hash that names it, `python` the interpreter's path inside."""

    digest: str
    rootfs: Path
    python: str


def host_python() -> str:
    """An interpreter that stands on its own: the system's, else the one that a virtual environment was made from."""
    system = "/usr/bin/python3"
    if os.path.exists(system):
        return os.path.realpath(system)
    base = os.path.realpath(os.path.join(sys.base_prefix, "bin", "python3"))
    return base if os.path.exists(base) else os.path.realpath(sys.executable)


def ready(images: Path) -> Image | None:
    """The image for this host as it is now, if it was built before."""
    note = images / f"{_host_key()}.json"
    try:
        found = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    image = Image(found["digest"], images / found["digest"], found["python"])
    return image if image.rootfs.is_dir() else None


def build(images: Path) -> Image:
    """The image for this host; about two seconds where it is not there yet. Blocking. Raises CreateFailed."""
    image = ready(images)
    if image is not None:
        return image
    images.mkdir(parents=True, exist_ok=True)
    python = host_python()
    sources = _closure(python)
    digest = _digest(sources)
    rootfs = images / digest
    inside = _inside(python)
    if not rootfs.is_dir():
        temporary = images / f"{digest}.{os.getpid()}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            _lay_out(temporary, sources, inside)
            os.rename(temporary, rootfs)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not rootfs.is_dir():
                raise CreateFailed(f"the sandbox image could not be built in {images}: {error}") from error
    note = images / f"{_host_key()}.json"
    temporary_note = note.with_suffix(f".{os.getpid()}.part")
    temporary_note.write_text(json.dumps({"digest": digest, "python": inside}))
    os.replace(temporary_note, note)
    return Image(digest, rootfs, inside)


def _host_key() -> str:
    """Changes when the image would: another interpreter, other libraries, another agent, another recipe."""
    facts: list[object] = [RECIPE, host_python()]
    for path in (host_python(), "/etc/ld.so.cache", "/var/lib/dpkg/status", *CERTIFICATES):
        try:
            st = os.stat(path)
            facts.append([st.st_size, st.st_mtime_ns])
        except OSError:
            facts.append(None)
    facts += [path.read_text() for path in sorted(AGENT_SOURCE.glob("*.py"))]
    facts.append(Path(__file__).read_text())
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _inside(path: str) -> str:
    """Where a file of the host lies in the image: /bin, /lib and the like are one with /usr there."""
    first = path.split("/")[1]
    return "/usr" + path if first in MERGED else path


def _closure(python: str) -> dict[str, str]:
    """Path in the image -> file on the host."""
    ask = [python, "-I", "-c", QUESTION]
    answer = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True, env={"PATH": SYSTEM_PATH})
    certificates, *folders = json.loads(answer.stdout)
    library = [path for folder in dict.fromkeys(folders) for path in _library(folder)]
    programs = [path for name in PROGRAMS if (path := shutil.which(name, path=SYSTEM_PATH)) is not None]
    if not any(path.endswith("/bash") for path in programs):
        raise CreateFailed("no bash on this host: install it (Debian: apt-get install bash)")
    binaries = [python, *(os.path.realpath(path) for path in programs)]
    shared = [path for path in library if path.endswith(".so") or ".so." in path]
    sources = {_inside(path): os.path.realpath(path) for path in [python, *programs, *library]}
    libraries = _libraries([*binaries, *shared])
    systems = {os.path.dirname(path) for path in libraries if "/libc.so" in path}
    beside = {os.path.join(folder, name) for folder in systems for name in WHEELS.split()}
    libraries |= {path for path in beside if os.path.exists(path)}
    sources.update({_inside(path): os.path.realpath(path) for path in libraries})
    if bundle := next((path for path in CERTIFICATES if os.path.isfile(path)), None):
        sources[certificates] = os.path.realpath(bundle)
    return sources


def _library(folder: str) -> Iterator[str]:
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("config-"))
        for name in sorted(names):
            path = os.path.join(base, name)
            if os.path.isfile(path) and os.access(path, os.R_OK) and not name.endswith(".a"):
                yield path


def _libraries(binaries: Iterable[str]) -> set[str]:
    """What the dynamic loader would open for these; scripts and static programs need nothing."""
    answer = subprocess.run(["ldd", *binaries], capture_output=True, text=True, timeout=120, env={"PATH": SYSTEM_PATH})
    return set(re.findall(r"(/\S+) \(0x", answer.stdout))


def libraries_in(root: Path, binaries: Iterable[Path]) -> list[Path]:
    """The files below `root` that the loader would open for these, which the host's own stand for."""
    inside = {_inside(path) for path in _libraries(str(path) for path in binaries)}
    return [root / path.lstrip("/") for path in sorted(inside)]


def _digest(sources: dict[str, str]) -> str:
    digest = hashlib.sha256()
    items = [*sources.items(), *((f"{AGENT_HOME}/agent/{path.name}", str(path)) for path in AGENT_SOURCE.glob("*.py"))]
    for inside, outside in sorted(items):
        with open(outside, "rb") as f:
            content = hashlib.file_digest(f, "sha256").hexdigest()
        digest.update(f"{len(inside)} {inside} {content}\n".encode())
    digest.update(json.dumps([RECIPE, TEXTS, FOLDERS]).encode())
    return digest.hexdigest()[:32]


def _lay_out(root: Path, sources: dict[str, str], python: str) -> None:
    for place in FOLDERS:
        (root / place).mkdir(parents=True, exist_ok=True)
    for name in MERGED:
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for inside, outside in sources.items():
        target = root / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(outside, target)
        executable = os.stat(outside).st_mode & stat.S_IXUSR
        target.chmod(0o755 if executable else 0o644)
    for name, text in TEXTS.items():
        (root / name).write_text(text)
    for name in ("python3", "python"):
        link = root / "usr/bin" / name
        if not link.exists():
            link.symlink_to(python)
    if not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("bash")
    agent = root / AGENT_HOME.lstrip("/") / "agent"
    agent.mkdir(parents=True)
    for path in AGENT_SOURCE.glob("*.py"):
        shutil.copy2(path, agent / path.name)
    _compile(root)
    _index_libraries(root)
    for base, folders, _ in os.walk(root):
        for name in folders:
            folder = os.path.join(base, name)
            if not os.path.islink(folder):
                os.chmod(folder, 0o755)
    root.chmod(0o755)


def _compile(root: Path) -> None:
    """Byte code for the whole library and the agent, by the interpreter that will run it; it works without, slower.

    Checked against nothing: no tool can write it, its source is never changed, and an engine that imports the image
    may not keep the times of its files.
    """
    folders = {path.parent for path in root.rglob("*.py")}
    compiler = [host_python(), "-I", "-m", "compileall", "-q", "-l", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    subprocess.run(
        [*compiler, "-s", str(root), "-p", "/", *map(str, sorted(folders))],
        capture_output=True,
        timeout=300,
        env={"PATH": SYSTEM_PATH},
        check=False,
        umask=READABLE,
    )


def _index_libraries(root: Path) -> None:
    """The loader's index, without which every program searches a dozen folders for each library; it may be missing."""
    program = shutil.which("ldconfig", path=SYSTEM_PATH)
    if program is not None:
        subprocess.run([program, "-X", "-r", str(root)], capture_output=True, timeout=60, check=False, umask=READABLE)


__all__ = ["AGENT_HOME", "Image", "build", "host_python", "libraries_in", "ready"]
