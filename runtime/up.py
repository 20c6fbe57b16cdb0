"""`tenuto up`: the whole stack on one machine, as supervised processes of one owner.

What was given by an address is used; what was not is started: Postgres, Temporal, the engine; then the schema is
brought up to date, and api, worker and node start with the resolved settings in their environment.

Events, each with a `message` for people: those of `supervisor.OnEvent`, then `ready` (api_url, home) once everything
serves, `warning`, and `stopped`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import psutil

from runtime import release as releasing
from runtime.embedded import PostgresServer, TemporalServer
from runtime.embedded.temporal import free_port
from runtime.errors import PortTaken
from runtime.home import alone, make_admin_key, make_secrets_key, orphans, private_dir, write_private
from runtime.preflight import check_listen
from runtime.process import connect_temporal
from runtime.seats import Seat, clear_unseated, seats
from runtime.settings import Settings
from runtime.supervisor import Child, OnEvent, Supervisor

USUAL_PORT: Final = 8300
_REAP_PATIENCE_S: Final = 30.0
_ORPHAN_PATIENCE_S: Final = 10.0


class Stack:
    """What is up so far. `settings` are resolved further by each component; up.json always shows them."""

    def __init__(self, settings: Settings, on_event: OnEvent) -> None:
        self.settings = settings
        self.on_event = on_event
        self.supervisor = Supervisor(settings.logs_dir, on_event, self.write_state)
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        self.is_ready = False
        self.engines: dict[str, str] = {}  # node id to address
        self._boot = secrets.token_hex(6)

    def resolve(self, **found: Any) -> None:
        self.settings = dataclasses.replace(self.settings, **found)
        self.write_state()

    def environment(self, settings: Settings | None = None) -> dict[str, str]:
        """Ours, with TENUTO_* as resolved, but for a key that no child needs there."""
        settings = dataclasses.replace(settings or self.settings, openai_key=None)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TENUTO_")}
        return {**kept, "PYTHONUNBUFFERED": "1", **settings.environment()}

    def python(self, name: str, *argv: str, settings: Settings | None = None, **how: Any) -> Child:
        """A module of ours as a child, with the resolved settings or with those of its seat."""
        return Child(name, [sys.executable, "-P", "-m", *argv], self.environment(settings), **how)

    def write_state(self) -> None:
        settings = self.settings
        state = {
            "pid": os.getpid(),
            "boot": self._boot,
            "ready": self.is_ready,
            "api_url": settings.api_url,
            "dsn": settings.postgres_dsn,
            "temporal": settings.temporal_address,
            "engine": settings.engine_address,
            "engines": self.engines,
            "processes": self.supervisor.pids,
        }
        try:
            write_private(settings.state_path, json.dumps(state, indent=1) + "\n")
        except OSError as error:  # a full disk must not take down what is up; the file is stale until the next change
            self.on_event("warning", message=f"{settings.state_path} could not be written: {error.strerror}")

    async def close(self) -> None:
        """Stops everything and removes what only a running stack has."""
        # All nodes at once: none of them then hands its sessions over to one that is about to stop as well.
        await self.supervisor.stop(together=[name for name in self.supervisor.pids if name.startswith("node")])
        for last in self.at_end:
            try:
                await asyncio.wait_for(last(), _REAP_PATIENCE_S)
            except Exception as error:
                self.on_event("warning", message=f"could not tidy up: {error or type(error).__name__}")
        settings = self.settings
        for directory in (settings.run_dir, settings.postgres_run_dir, settings.arena_dir):
            shutil.rmtree(directory, ignore_errors=True)
        settings.state_path.unlink(missing_ok=True)
        self.on_event("stopped", message="stopped")


Component: TypeAlias = Callable[[Stack], Awaitable[None]]


# --- components ----------------------------------------------------------------------------------------------------


async def postgres(stack: Stack) -> None:
    if stack.settings.postgres_dsn is not None:
        return
    server = PostgresServer(stack.settings)
    if not (server.data / "PG_VERSION").exists():
        stack.on_event("progress", name="postgres", message="making the database, once")
    await _whole(server.prepare)
    account = server.account
    child = Child(
        "postgres",
        server.argv(),
        server.environment(),
        before=lambda: _whole(server.settle),
        ready=server.wait_ready,
        stop_signal=server.stop_signal,
        death_signal=server.death_signal,
        uid=account.uid if account else None,
        gid=account.gid if account else None,
    )
    await stack.supervisor.start(child)
    stack.resolve(postgres_dsn=server.dsn)


async def _whole(work: Callable[[], None]) -> None:
    """In a thread and to its end, even when cancelled: it must not go on making things while they are tidied up."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


async def temporal(stack: Stack) -> None:
    if stack.settings.temporal_address is not None:
        return
    server = TemporalServer(stack.settings)
    server.prepare()
    await stack.supervisor.start(Child("temporal", server.argv(), server.environment(), ready=server.wait_ready))
    stack.resolve(temporal_address=server.address)


async def migrations(stack: Stack) -> None:
    await stack.supervisor.run_once(stack.python("migrations", "runtime.migrate"))


async def engine(stack: Stack) -> None:
    """One for every node, all loading at once."""
    found = seats(stack.settings)
    if stack.settings.engine_address is not None:
        stack.engines = {found[0].settings.node_id: stack.settings.engine_address}
        return
    if stack.settings.external is not None:
        children = [
            stack.python(seat.engine, "engine.external", *_external_argv(stack.settings, seat), **_LOADS)
            for seat in found
        ]
        await _start_engines(stack, found, children)
        return
    if len(found) > 1 and stack.settings.shared_kv is None:
        stack.resolve(shared_kv=str(stack.settings.shared_kv_dir))
        stack.settings.shared_kv_dir.mkdir(mode=0o700, exist_ok=True)
    private_dir(stack.settings.arena_dir)
    await asyncio.to_thread(clear_unseated, stack.settings)
    model = await asyncio.to_thread(lambda: stack.settings.model_path)
    argvs = [_engine_argv(stack.settings, seat, model) for seat in found]
    children = [stack.python(seat.engine, "engine", *argv, **_LOADS) for seat, argv in zip(found, argvs, strict=True)]
    await _start_engines(stack, found, children)


async def _start_engines(stack: Stack, found: Sequence[Seat], children: Sequence[Child]) -> None:
    await asyncio.gather(*(stack.supervisor.start(child) for child in children))
    stack.engines = {seat.settings.node_id: str(seat.socket) for seat in found}
    stack.resolve(engine_address=str(found[0].socket))


def _external_argv(settings: Settings, seat: Seat) -> list[str]:
    """Of an engine in front of a model server. The key goes by a file, which a restarted engine finds again."""
    external = settings.external
    assert external is not None
    argv: dict[str, Any] = {
        "--url": external.url,
        "--name": external.model,
        "--socket": seat.socket,
        "--kind": settings.openai_kind,
        "--context": settings.openai_context,
        "--connect-s": settings.openai_connect_s,
        "--first-s": settings.openai_first_s,
        "--between-s": settings.openai_between_s,
    }
    if settings.openai_key is not None:
        write_private(settings.openai_key_path, settings.openai_key)
        argv["--key-file"] = settings.openai_key_path
    return [str(part) for pair in argv.items() if pair[1] is not None for part in pair]


def _engine_argv(settings: Settings, seat: Seat, model: Path) -> list[str]:
    seat.kv_dir.mkdir(mode=0o700, exist_ok=True)
    argv = {
        "--model": model,
        "--socket": seat.socket,
        "--kv-tokens": settings.kv_tokens,
        "--host-arena": seat.host_arena,
        "--host-bytes": seat.settings.host_kv_bytes,
        "--nvme-dir": seat.kv_dir,
        "--nvme-bytes": seat.settings.nvme_kv_bytes,
        "--threads": seat.threads,
        "--dtype": settings.engine_dtype,
        "--kv-dtype": settings.kv_dtype,
        "--backend": settings.engine_backend,
        "--kv-compression": settings.kv_compression,
        "--kv-encryption": settings.kv_encryption,
        "--speculation": settings.speculation,
    }
    if settings.draft_model is not None:
        argv |= {"--draft-model": settings.draft_model}
    if settings.kv_decisions is not None:
        argv |= {"--decision-log": settings.kv_decisions}
    if settings.shared_kv is not None:
        argv |= {"--shared": settings.shared_kv, "--shared-bytes": settings.shared_kv_bytes}
    return [str(part) for pair in argv.items() for part in pair]


def _loading(facts: Mapping[str, Any]) -> str:
    """Words for a line of progress of the engine."""
    if "error" in facts:
        return f"engine: {facts['error']}"
    return f"{facts.get('what', 'loading')} {facts.get('progress', 0):.0%}"


_LOADS: Final[Mapping[str, Any]] = {"ready_within_s": 900.0, "describe": _loading}


async def api(stack: Stack) -> None:
    host, port = stack.settings.api_host, _port(stack)
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
    stack.resolve(api_port=port, api_url=url)

    async def answers() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/healthz")).is_success:
                        return
                await asyncio.sleep(0.05)

    await stack.supervisor.start(stack.python("api", "runtime.api", ready=answers))


def _port(stack: Stack) -> int:
    """The one that was asked for; where none was, the usual one if it is free. Raises StartupError."""
    host, asked = stack.settings.api_host, stack.settings.api_port
    port = USUAL_PORT if asked is None else asked
    try:
        check_listen(host, port)
    except PortTaken:
        if asked is not None:
            raise
        port = free_port(host)
        stack.on_event("warning", message=f"port {USUAL_PORT} on {host} is taken; the API is on port {port} instead")
    return port or free_port(host)


async def worker(stack: Stack) -> None:
    count = stack.settings.workers
    names = ["worker"] if count == 1 else [f"worker-{number}" for number in range(1, count + 1)]
    await asyncio.gather(*(stack.supervisor.start(stack.python(name, "runtime.worker")) for name in names))


async def release(stack: Stack) -> None:
    """The workflow code of this release is the current one, and every open session is on its way to it."""
    client = await connect_temporal(stack.settings)
    done = await releasing.release(client, releasing.build_id())
    if done.restarted:
        message = f"{done.restarted} sessions of an earlier release go on with this one"
        stack.on_event("progress", name="release", message=message)


async def node(stack: Stack) -> None:
    stack.at_end.append(lambda: _reap_sandboxes(stack.settings))
    first, *others = (
        # The first start may build the sandboxes' image.
        stack.python(seat.node, "runtime.node", settings=_of_seat(stack, seat), ready_within_s=900.0)
        for seat in seats(stack.settings)
    )
    await stack.supervisor.start(first)
    await asyncio.gather(*(stack.supervisor.start(other) for other in others))


def _of_seat(stack: Stack, seat: Seat) -> Settings:
    """A node's own settings; its engine is where the stack started it."""
    return dataclasses.replace(seat.settings, engine_address=stack.engines[seat.settings.node_id])


async def _reap_sandboxes(settings: Settings) -> None:
    """A sandbox outlives its node on purpose; it does not outlive the stack. Sessions go on from their snapshots."""
    from sandbox import choose_driver

    driver = await choose_driver(settings.home, settings.run_dir, settings.sandbox)
    await driver.reap(())


COMPONENTS: Final[tuple[Component, ...]] = (
    postgres,
    temporal,
    migrations,
    engine,
    api,
    worker,
    release,
    node,
)


# --- the whole -----------------------------------------------------------------------------------------------------


async def up(settings: Settings, on_event: OnEvent, *, components: Sequence[Component] = COMPONENTS) -> None:
    """Runs until SIGINT, SIGTERM or SIGHUP, then stops everything. Call it in the main thread.

    Raises StartupError, with a sentence, where the stack cannot start or something in it cannot be kept up.
    """
    with alone(settings):
        await asyncio.to_thread(psutil.wait_procs, orphans(settings.state_path), timeout=_ORPHAN_PATIENCE_S)
        async with _until_signal() as signalled:
            stack = Stack(settings, on_event)
            try:
                await _run(stack, components, signalled)
            finally:
                await stack.close()


async def _run(stack: Stack, components: Sequence[Component], signalled: asyncio.Event) -> None:
    private_dir(stack.settings.run_dir)
    make_admin_key(stack.settings.admin_key_path)
    if stack.settings.secrets_key is None:
        make_secrets_key(stack.settings.secrets_key_path)
    stack.write_state()
    waits = [asyncio.create_task(one) for one in (_bring_up(stack, components), signalled.wait())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _bring_up(stack: Stack, components: Sequence[Component]) -> None:
    """Everything in order, then for ever, unless a child is given up."""
    for component in components:
        await component(stack)
    stack.is_ready = True
    stack.write_state()
    url, home = stack.settings.api_url, str(stack.settings.home)
    stack.on_event("ready", message=f"ready at {url}" if url else "ready", api_url=url, home=home)
    await stack.supervisor.failed()


@contextlib.asynccontextmanager
async def _until_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM or a closed terminal sets; a second signal changes nothing."""
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, signalled.set)
    try:
        yield signalled
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
