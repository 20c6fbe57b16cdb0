"""Child processes: started in order, restarted when they die, stopped in reverse, never left behind.

Every child asks the kernel for a signal at its parent's death, so a killed supervisor leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

from runtime import deaths
from runtime.errors import StartupError
from runtime.process import REFUSED

FIRST_BACKOFF_S: Final = 0.2
LAST_BACKOFF_S: Final = 5.0
HEALTHY_AFTER_S: Final = 10.0
GIVE_UP_AFTER: Final = 8
STOP_PATIENCE_S: Final = 10.0
LOG_BYTES: Final = 4 * 2**20
_LINE_BYTES: Final = 2**20
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


class OnEvent(Protocol):
    """Told what happens: `starting`, `progress`, `started`, `died` (all with `name` and `message`)."""

    def __call__(self, kind: str, **data: Any) -> None: ...


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Child:
    """How a process is run. `before` runs ahead of every start, `ready` after it.

    `ready` returns when the child serves; None means: when it prints a JSON object on a line of standard output.
    JSON objects on standard error are progress, which `describe` puts into words where they bring no `message`; one
    with `error` says what went wrong, and with exit status 2 (`process.REFUSED`) that starting again cannot help.
    Everything goes to the log as well.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    before: Callable[[], Awaitable[None]] = _nothing
    ready: Callable[[], Awaitable[None]] | None = None
    ready_within_s: float = 60.0
    stop_signal: int = signal.SIGTERM
    death_signal: int = signal.SIGKILL
    uid: int | None = None
    gid: int | None = None
    cwd: Path = Path("/")
    describe: Callable[[Mapping[str, Any]], str] = json.dumps


@dataclass
class _Running:
    child: Child
    process: Process | None = None
    task: asyncio.Task[None] | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    pumps: list[asyncio.Task[None]] = field(default_factory=list)
    log_start: int = 0  # where this life's lines begin in the log


@dataclass(frozen=True)
class _Death:
    served: bool
    how: str
    status: int | None = None


class Supervisor:
    """Owns its children from `start` to `stop`. One event loop; not thread-safe.

    `on_change` is called whenever a pid changes.
    """

    def __init__(self, logs: Path, on_event: OnEvent, on_change: Callable[[], None] = lambda: None) -> None:
        self._logs, self._on_event, self._on_change = logs, on_event, on_change
        self._running: dict[str, _Running] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        """Of those that run now, in the order in which they were first started."""
        return {
            name: one.process.pid
            for name, one in self._running.items()
            if one.process is not None and one.process.returncode is None
        }

    async def start(self, child: Child) -> None:
        """Returns when the child is ready. Raises StartupError where it cannot be made to run."""
        running = _Running(child)
        self._running[child.name] = running
        self._on_event("starting", name=child.name, message=f"starting {child.name}")
        running.task = asyncio.create_task(self._keep(running), name=f"keep {child.name}")
        up = asyncio.create_task(running.up.wait())
        waits: tuple[asyncio.Future[Any], ...] = (up, self._failure)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._failure.done():
            self._failure.result()

    async def run_once(self, child: Child) -> None:
        """Runs a child to its end. Raises StartupError with its last words where it fails."""
        self._on_event("starting", name=child.name, message=f"running {child.name}")
        await child.before()
        with self._log(child.name) as log:
            start = os.fstat(log.fileno()).st_size
            process = await _spawn(child, stdout=log, stderr=log)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if status:
            refusal = self._refusal(child.name, start) if status == REFUSED else None
            words = self._last_words(child.name, start)
            raise StartupError(refusal or f"{child.name} ended with status {status}: {words}")

    async def failed(self) -> None:
        """Waits until a child is given up, then raises StartupError."""
        await asyncio.shield(self._failure)

    async def stop(self, together: Collection[str] = ()) -> None:
        """In reverse order of starting, those named in `together` first and at once; returns when none is left.
        Idempotent."""
        self._stopping = True
        await asyncio.gather(*(self._end(self._running[name]) for name in together))
        for running in reversed(list(self._running.values())):
            await self._end(running)
        if not self._failure.done():
            self._failure.cancel()
        elif not self._failure.cancelled():
            self._failure.exception()  # seen, whether or not anyone waited for it

    # --- one child -----------------------------------------------------------------------------------------------

    async def _keep(self, running: _Running) -> None:
        """Starts the child again whenever it dies, until stopped or hopeless."""
        backoff_s, early_deaths = FIRST_BACKOFF_S, 0
        clock = asyncio.get_running_loop().time
        while not self._stopping:
            born = clock()
            try:
                death = await self._live(running)
            except StartupError as error:
                self._fail(error)
                return
            except Exception as error:
                self._fail(StartupError(f"{running.child.name} could not be watched over: {error!r}"))
                return
            self._on_change()
            if self._stopping:
                return
            await self._note(running, death)
            early_deaths = 0 if death.served else early_deaths + 1
            if early_deaths >= GIVE_UP_AFTER or self._is_hopeless(running, death):
                self._give_up(running, death)
                return
            if clock() - born > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._on_event(
                "died",
                name=running.child.name,
                restart_in_s=backoff_s,
                message=f"{running.child.name} {death.how}; starting it again in {backoff_s:.1f} s",
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _live(self, running: _Running) -> _Death:
        """One life, from its start to its end."""
        child = running.child
        await child.before()
        try:
            first_line = await self._launch(running)
        except OSError as error:
            return _Death(False, f"could not be started: {error}")
        process = running.process
        assert process is not None
        self._on_change()
        ended = asyncio.create_task(process.wait())
        ready = asyncio.ensure_future(first_line if child.ready is None else child.ready())
        try:
            await asyncio.wait({ended, ready}, timeout=child.ready_within_s, return_when=asyncio.FIRST_COMPLETED)
            served = ready.done() and not ended.done()
            if served:
                ready.result()
                running.up.set()
                self._on_event("started", name=child.name, pid=process.pid, message=f"{child.name} is up")
            elif not ended.done():
                process.kill()
            status = await ended
        finally:
            ready.cancel()
            ended.cancel()
        if not served and status == -signal.SIGKILL and not self._stopping:
            return _Death(False, f"was not ready within {child.ready_within_s:.0f} s, or was killed before")
        return _Death(served, _how(status), status)

    async def _launch(self, running: _Running) -> asyncio.Future[None]:
        """Spawns and reads; the future is done when the first JSON line came on standard output."""
        child, first_line = running.child, asyncio.get_running_loop().create_future()

        def on_out(line: bytes) -> None:
            if _json(line) is not None and not first_line.done():
                first_line.set_result(None)

        def on_err(line: bytes) -> None:
            if (facts := _json(line)) is not None:
                self._on_event("progress", **{"message": child.describe(facts), **facts, "name": child.name})

        await _end_pumps(running.pumps)
        with self._log(child.name) as log:
            running.log_start = os.fstat(log.fileno()).st_size
            # Pipes of our own: waiting for the process must not wait for whoever else inherited asyncio's.
            (out, child_out), (err, child_err) = os.pipe(), os.pipe()
            try:
                running.process = await _spawn(child, stdout=child_out, stderr=child_err)
            except BaseException:
                os.close(out)
                os.close(err)
                raise
            finally:
                os.close(child_out)
                os.close(child_err)
            pumps = (_pump(fd, os.dup(log.fileno()), tell) for fd, tell in ((out, on_out), (err, on_err)))
            running.pumps = [asyncio.create_task(one) for one in pumps]
        return first_line

    async def _end(self, running: _Running) -> None:
        """Asks, waits, insists. Then whatever is left of its process group goes too."""
        if running.task is not None:  # first, or it would start the child again
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        process = running.process
        if process is not None and process.returncode is None:
            self._on_event("stopping", name=running.child.name, message=f"stopping {running.child.name}")
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(running.child.stop_signal)
            try:
                await asyncio.wait_for(process.wait(), STOP_PATIENCE_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await _end_pumps(running.pumps)

    async def _note(self, running: _Running, death: _Death) -> None:
        """Keep how it ended for whoever asks later."""
        await _end_pumps(running.pumps)  # its last words may still be on their way
        name, words = running.child.name, self._last_words(running.child.name, running.log_start)
        deaths.note(self._logs, name, served=death.served, status=death.status, how=death.how, words=words)

    def _is_hopeless(self, running: _Running, death: _Death) -> bool:
        """It refused the very first time. One that has served before may find what it misses once more."""
        return death.status == REFUSED and not death.served and not running.up.is_set()

    def _give_up(self, running: _Running, death: _Death) -> None:
        name, start = running.child.name, running.log_start
        refusal = self._refusal(name, start) if self._is_hopeless(running, death) else None
        often = "" if self._is_hopeless(running, death) else f", {GIVE_UP_AFTER} times in a row before it was ready"
        words = self._last_words(name, start)
        where = self._logs / f"{name}.log"
        self._fail(StartupError(refusal or f"{name} {death.how}{often}; its last words: {words} (more in {where})"))

    def _fail(self, error: StartupError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # --- logs ----------------------------------------------------------------------------------------------------

    def _log(self, name: str) -> IO[bytes]:
        """Appends; one that has grown makes room first, and one older is kept."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._logs / f"{name}.log"
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.rename(path.with_suffix(".log.1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(fd, "ab", buffering=0)

    def _refusal(self, name: str, start: int) -> str | None:
        """The sentence in which a child said why it cannot run, if it did."""
        errors = [facts["error"] for line in self._lines(name, start) if "error" in (facts := _json(line) or {})]
        return str(errors[-1]) if errors else None

    def _last_words(self, name: str, start: int) -> str:
        lines = self._lines(name, start)
        said = self._refusal(name, start) or (lines[-1].decode(errors="replace") if lines else "none")
        return said[:400]

    def _lines(self, name: str, start: int) -> list[bytes]:
        """The last lines of the log from a position on."""
        path = self._logs / f"{name}.log"
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(start, path.stat().st_size - 65536))
            return [line for line in log.read().splitlines() if line.strip()]
        return []


async def _spawn(child: Child, *, stdout: int | IO[bytes], stderr: int | IO[bytes]) -> Process:
    """In its own process group, with a private umask, bound to our life."""
    account: dict[str, Any] = {}
    if child.uid is not None:
        account = {"user": child.uid, "group": child.gid, "extra_groups": []}
    return await asyncio.create_subprocess_exec(
        *child.argv,
        env=dict(child.env),
        cwd=child.cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        umask=0o077,
        preexec_fn=die_with(os.getpid(), child.death_signal),
        **account,
    )


def die_with(parent: int, number: int) -> Callable[[], None]:
    """Runs in the child after it changed its account, which would have cleared the request."""

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and here
            os._exit(1)

    return ask


async def _pump(pipe: int, log: int, on_line: Callable[[bytes], None]) -> None:
    """Reads to the end, whatever comes; a full disk loses log lines and nothing else. Closes both."""
    reader, rest = asyncio.StreamReader(), b""
    with os.fdopen(pipe, "rb", buffering=0) as source, os.fdopen(log, "ab", buffering=0) as target:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        try:
            while chunk := await reader.read(65536):
                with contextlib.suppress(OSError):
                    target.write(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    on_line(line)
                rest = rest[-_LINE_BYTES:]
        finally:
            transport.close()


async def _end_pumps(pumps: Sequence[asyncio.Task[None]]) -> None:
    """Lets them read what is left; what a grandchild might still write is not waited for."""
    if pumps:
        await asyncio.wait(pumps, timeout=1.0)
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)


def _json(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
