"""The account that Postgres runs as: it refuses to be root, and needs a name in the password file."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.errors import StartupError

_DEDICATED: Final = "tenuto-postgres"
_FALLBACKS: Final = ("postgres", "nobody")


@dataclass(frozen=True)
class Account:
    """Who a child runs as."""

    name: str
    uid: int
    gid: int

    def owns(self, path: Path) -> bool:
        return path.stat().st_uid == self.uid

    def take(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)

    def reaches(self, path: Path) -> bool:
        """Whether this account can pass through every directory above `path`."""
        return all(self._may_enter(parent) for parent in path.resolve().parents)

    def _may_enter(self, directory: Path) -> bool:
        found = directory.stat()
        if found.st_uid == self.uid:
            return bool(found.st_mode & 0o100)
        return bool(found.st_mode & (0o010 if found.st_gid == self.gid else 0o001))


def choose_account(data: Path) -> Account | None:
    """None where we are not root. Else whoever owns the data already, a new system user, or an unprivileged one."""
    if os.geteuid() != 0:
        return None
    owner = _by_uid(data.stat().st_uid) if data.exists() else None
    if owner is not None and owner.uid != 0:
        return owner
    for account in (_by_name(_DEDICATED), _create(_DEDICATED), *map(_by_name, _FALLBACKS)):
        if account is not None:
            return account
    raise StartupError(
        "Postgres does not run as root, and there is no other account for it: create a system user named"
        f" {_DEDICATED}, or start Tenuto as an ordinary user, or give TENUTO_POSTGRES_DSN"
    )


def _create(name: str) -> Account | None:
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if useradd is None:
        return None
    shell = "/usr/sbin/nologin" if Path("/usr/sbin/nologin").exists() else "/bin/false"
    subprocess.run(
        [useradd, "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", shell, name],
        capture_output=True,
        check=False,
    )
    return _by_name(name)


def _by_name(name: str) -> Account | None:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(found.pw_name, found.pw_uid, found.pw_gid)


def _by_uid(uid: int) -> Account | None:
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        return None
    return Account(found.pw_name, found.pw_uid, found.pw_gid)
