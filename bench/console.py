"""What a page of the console takes with ten thousand sessions, over what it takes with ten.

    python -m bench.console --evidence DIR

Two installations stand side by side, each an API with a database of its own, filled with a month of use: ten sessions,
and ten thousand. Every page is asked for in turn at both. No node is up, so that no page waits for one.

`--sabotage` must turn the figure red: `unindexed` drops indexes that the pages need, `alter` makes the evidence look
better than it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import click
import httpx

from bench import evidence
from bench.console_figures import FEW, MANY, figures, misses, report
from bench.console_fill import fill
from bench.evidence import Line
from bench.verdict import show, tell
from runtime.embedded import PostgresServer, TemporalServer
from runtime.embedded.temporal import free_port
from runtime.home import make_secrets_key
from runtime.migrate import migrate
from runtime.settings import Settings

KEY = "tk_bench_console"
ONE = "ses_" + "0" * 24
PAGES = {
    "fleet": "/",
    "sessions": "/sessions",
    "sessions of a tenant": "/sessions?tenant=tenant-3",
    "sessions that failed": "/sessions?state=failed",
    "sessions by id": f"/sessions?text={ONE[-6:]}",
    "session": f"/sessions/tenant-0/{ONE}",
    "approvals": "/approvals",
    "kv": "/kv",
    "sandboxes": "/sandboxes",
    "nodes": "/nodes",
    "tenants": "/tenants",
    "tenant": "/tenants/tenant-3",
    "usage": "/usage",
    "audit": "/audit",
}
NEEDED = ("sessions_in_order", "steps_by_end", "usage_by_time", "usage_of_tenant")


async def measure(times: int, sabotage: str | None) -> list[Line]:
    home = Path(tempfile.mkdtemp(prefix="tenuto-bench-", dir="/tmp"))
    home.chmod(0o711)
    try:
        async with contextlib.AsyncExitStack() as stack:
            servers = await stack.enter_async_context(_servers(home))
            places = {of: await stack.enter_async_context(_api(*servers, home, of, sabotage)) for of in (FEW, MANY)}
            lines: list[Line] = [{"kind": "about", "python": sys.version, "load": evidence.load_average()}]
            for turn in range(times + 1):
                for name, path in PAGES.items():
                    for of, http in places.items():
                        began = time.perf_counter()
                        answer = await http.get(f"/console{path}")
                        took = time.perf_counter() - began
                        assert answer.status_code == 200, f"{name}: {answer.status_code}"
                        if turn:  # the first one warms up
                            lines.append({"kind": "page", "page": name, "of": of, "ms": 1e3 * took})
            return lines
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.asynccontextmanager
async def _servers(home: Path) -> AsyncIterator[tuple[PostgresServer, TemporalServer]]:
    settings = Settings.load({}, {"TENUTO_HOME": str(home / "servers")})
    (home / "servers").mkdir(mode=0o711)
    postgres, temporal = PostgresServer(settings), TemporalServer(settings)
    processes = []
    try:
        for server in (postgres, temporal):
            server.prepare()
            account = getattr(server, "account", None)
            processes.append(
                await asyncio.create_subprocess_exec(
                    *server.argv(),
                    env={**os.environ, **server.environment()},
                    user=account.uid if account else None,
                    group=account.gid if account else None,
                    extra_groups=[] if account else None,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            )
            await server.wait_ready()
        yield postgres, temporal
    finally:
        for process, how in zip(processes, (postgres.stop_signal, temporal.stop_signal), strict=False):
            process.send_signal(how)
            await process.wait()
        shutil.rmtree(postgres.socket_dir, ignore_errors=True)


@contextlib.asynccontextmanager
async def _api(
    postgres: PostgresServer, temporal: TemporalServer, home: Path, sessions: int, sabotage: str | None
) -> AsyncIterator[httpx.AsyncClient]:
    """An API over so many sessions, and an operator who is logged in there."""
    tell(f"writing {sessions} sessions")
    name = f"of_{sessions}"
    connection = await asyncpg.connect(postgres.dsn)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    head, _, query = postgres.dsn.partition("?")
    dsn = f"{head.rsplit('/', 1)[0]}/{name}?{query}"
    await migrate(dsn)
    await fill(dsn, sessions)
    if sabotage == "unindexed":
        connection = await asyncpg.connect(dsn)
        for index in NEEDED:
            await connection.execute(f"DROP INDEX {index}")
        await connection.close()
    own = home / name
    own.mkdir()
    (own / "admin.key").write_text(KEY)
    make_secrets_key(own / "secrets.key")
    port = free_port("127.0.0.1")
    given = {
        "TENUTO_HOME": str(own),
        "TENUTO_POSTGRES_DSN": dsn,
        "TENUTO_TEMPORAL_ADDRESS": temporal.address,
        "TENUTO_API_PORT": str(port),
        "TENUTO_LOG_LEVEL": "warning",
    }
    environment = {**Settings.load({}, given).environment(), "PYTHONPATH": ":".join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "runtime.api", env=environment)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/healthz")).is_success:
                        break
                await asyncio.sleep(0.1)
            assert (await http.post("/console/login", data={"key": KEY})).status_code == 303
            yield http
    finally:
        process.terminate()
        await process.wait()


@click.command()
@click.option("--times", type=click.IntRange(1), default=15, show_default=True, help="Each page at each place.")
@click.option("--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw samples here.")
@click.option("--sabotage", type=click.Choice(["unindexed", "alter"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(times: int, directory: Path | None, sabotage: str | None, as_json: bool) -> None:
    """What pages of the console take with ten thousand sessions, over ten."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lines = asyncio.run(measure(times, sabotage))
    with tempfile.TemporaryDirectory() as spare:
        path = (directory or Path(spare)) / "console.jsonl"
        evidence.leave(path, lines)
        if sabotage == "alter":
            evidence.alter(path, "page", "ms", 0.5)
        figure = figures(*evidence.read(path))
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
