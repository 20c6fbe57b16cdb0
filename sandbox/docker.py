"""Sandboxes by Docker: one container each, through the `docker` command, whose every call has a deadline.

The image is the same host closure that bubblewrap uses, imported and never pulled. The agent is the container's first
process. Its socket is in a folder of the host that is mounted into the container and that only we and the container's
user may enter; the agent lets nobody in who has a pid in its own namespace, and both sides prove that they know the
token. The container does not need us, nor dockerd, to go on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import secrets
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from . import cgroups, host, image, images, seccomp, unstopped
from .driver import Sandbox
from .errors import CreateFailed, NoSandbox, SandboxFailure, SandboxLost
from .launch import confirmed
from .link import unix_connect
from .spec import MAX_FILES, SHM_BYTES, Description, Handle, SandboxSpec

ISOLATION = "containers: namespaces, cgroups, no capabilities and two system call filters, on the host's own kernel"
CALL_S = 30.0
START_S = 30.0
CONTROL = "/run/tenuto"
BOOT = "import sys; sys.path.insert(0, {folder!r}); from agent.main import main; main()"
LABEL = "tenuto"


class Engine:
    """The docker command, with a deadline on every call. Blocking."""

    def __init__(self, program: str = "docker", environment: Mapping[str, str] | None = None) -> None:
        self.program = program
        self.environment = environment

    def ask(self, *words: str, patience_s: float | None = None, stdin: IO[bytes] | None = None) -> str:
        """Standard output. Raises SandboxFailure with what the engine said, or that it said nothing in time."""
        patience_s = CALL_S if patience_s is None else patience_s
        try:
            answer = subprocess.run(
                [self.program, *words],
                stdin=stdin or subprocess.DEVNULL,
                capture_output=True,
                timeout=patience_s,
                env=self.environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SandboxFailure(f"docker {words[0]} did not answer within {patience_s:.0f} s") from None
        except OSError as error:
            raise SandboxFailure(f"the docker command does not start: {error}") from None
        if answer.returncode != 0:
            said = answer.stderr.decode(errors="replace").strip()
            raise SandboxFailure(f"docker {words[0]}: {said[-500:] or f'exit code {answer.returncode}'}")
        return answer.stdout.decode(errors="replace").strip()

    def inspect(self, container: str) -> dict[str, Any] | None:
        """The container as the engine knows it; None where it knows none."""
        try:
            found = json.loads(self.ask("inspect", "--type", "container", container))
        except SandboxFailure as error:
            if "no such" in str(error).lower():
                return None
            raise
        return dict(found[0])


def why_not(engine: Engine | None = None) -> str | None:
    """Why Docker cannot be used here, as a sentence; None if an engine answers."""
    if shutil.which((engine or Engine()).program) is None:
        return "Docker is not installed (its command-line client is needed)"
    if not seccomp.supported():
        return f"no system call filter for this processor ({os.uname().machine}); x86-64 and aarch64 have one"
    try:
        (engine or Engine()).ask("version", "--format", "{{.Server.Version}}", patience_s=5)
    except SandboxFailure as error:
        return f"no Docker engine answers: {error}"
    return None


class DockerDriver:
    """Open with `await DockerDriver.open(home, run_dir)`."""

    name = "docker"
    isolation = ISOLATION

    def __init__(self, run_dir: Path, engine: Engine, own: images.Runnable, users: images.UserImages) -> None:
        self.engine = engine
        self.own = own
        self.users = users
        self.home = host.home_id(run_dir)
        self.records = host.Records(run_dir / "docker")
        self.quarantined: set[str] = set()

    @classmethod
    async def open(cls, home: Path, run_dir: Path, engine: Engine | None = None, *, pull: bool = False) -> DockerDriver:
        """Builds and imports the image where it is missing. Raises NoSandbox, CreateFailed.

        `pull`: images of users that the engine does not have may be fetched from their registries.
        """
        engine = engine or Engine()
        reason = await asyncio.to_thread(why_not, engine)
        if reason is not None:
            raise NoSandbox(reason)
        built = await asyncio.to_thread(image.build, home / "sandbox" / "images")
        own = await asyncio.to_thread(images.own, engine, built)
        users = images.UserImages(engine, built, host.home_id(run_dir), home / "sandbox" / "making", pull)
        with suppress(SandboxFailure):  # the next start will do
            await asyncio.to_thread(users.clean)
        return cls(run_dir, engine, own, users)

    async def create(self, spec: SandboxSpec) -> Handle:
        handle = await asyncio.to_thread(self._create, spec)
        return await confirmed(self, handle, self.records.folder(spec.sandbox_id) / "agent.log")

    def _create(self, spec: SandboxSpec) -> Handle:
        host.must_fit(spec.limits)
        runnable = self.own if spec.image is None else self.users.runnable(spec.image)
        folder = self.records.make(spec.sandbox_id)
        try:
            uid = host.free_uid(self.home, spec.sandbox_id, spec.session_id) if os.getuid() == 0 else os.getuid()
            token = secrets.token_hex(32)
            control = self._control(spec, folder, uid, token)
            container = self.engine.ask(
                "run", "--detach", *self._options(spec, runnable, control, uid), patience_s=START_S
            )
            return self._handle(spec, runnable, container, control / "agent.sock", token)
        except BaseException as error:
            with suppress(SandboxFailure):  # quarantined: an engine that hangs may yet make it
                self._remove(spec.sandbox_id)
            if isinstance(error, OSError | SandboxFailure) and not isinstance(error, CreateFailed):
                raise CreateFailed(f"the sandbox {spec.sandbox_id} could not be made: {error}") from error
            raise

    def _control(self, spec: SandboxSpec, folder: Path, uid: int, token: str) -> Path:
        """The folder of the agent's socket, with its configuration, which it removes when it has read it."""
        control = folder / "control"
        control.mkdir(mode=0o700)
        config = {
            "token": token, "epoch": spec.epoch, "work": "/work", "ttl_s": spec.ttl_s, "outside_only": True,
            "memory_bytes": spec.limits.memory_bytes, "seccomp": seccomp.program(segments=True).hex(),
            "listen_fd": None, "listen_path": f"{CONTROL}/agent.sock", "limits": {}, "nice": 15,
            "tmpfs": ["/work", "/tmp", "/dev/shm"], "max_files": MAX_FILES,
            "oom_counters": ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"],
        }  # fmt: skip
        path = control / "config.json"
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as f:
            json.dump(config, f)
        if os.getuid() == 0:
            os.chown(path, uid, uid)
            os.chown(control, uid, uid)
        return control

    def _options(self, spec: SandboxSpec, runnable: images.Runnable, control: Path, uid: int) -> list[str]:
        limits = spec.limits
        gid = uid if os.getuid() == 0 else os.getgid()
        memory = str(limits.footprint_bytes)
        owner = f"uid={uid},gid={gid},nosuid,nodev,exec"
        words = ["--pull", "never", "--name", self._container(spec.sandbox_id), "--network", "none", "--read-only"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{uid}:{gid}"]
        words += ["--pids-limit", str(limits.pids + 3), "--memory", memory, "--memory-swap", memory]
        words += ["--cpus", str(limits.cpu), "--shm-size", str(SHM_BYTES), "--log-driver", "none"]
        words += ["--sysctl", f"kernel.shmall={SHM_BYTES // resource.getpagesize()}"]
        words += ["--tmpfs", f"/work:rw,mode=0755,size={limits.workspace_bytes},{owner}"]
        words += ["--tmpfs", f"/tmp:rw,mode=1777,size={limits.tmp_bytes},{owner}"]
        words += ["--mount", f"type=bind,source={control},target={CONTROL}"]
        for volume in spec.volumes:
            mode = ",readonly" if volume.read_only else ""
            words += ["--mount", f"type=bind,source={volume.source},target={volume.target}{mode}"]
        words += ["--workdir", "/work", "--hostname", "sandbox", "--restart", "no", "--no-healthcheck"]
        words += ["--entrypoint", runnable.words[0]]
        labels = {"home": self.home, "sandbox": spec.sandbox_id, "session": spec.session_id, "owner": spec.tenant_id}
        labels |= {"boot": host.boot_id(), **{f"label.{name}": value for name, value in spec.labels.items()}}
        for name, value in labels.items():
            words += ["--label", f"{LABEL}.{name}={value}"]
        words += [runnable.tag, *runnable.words[1:], "-I", "-S", "-B", "-c", BOOT.format(folder=runnable.agent)]
        return [*words, "tenuto-agent", self.home, spec.sandbox_id, f"{CONTROL}/config.json"]

    def _handle(self, spec: SandboxSpec, runnable: images.Runnable, container: str, socket: Path, token: str) -> Handle:
        facts = self.engine.inspect(container)
        if facts is None or not facts["State"]["Running"]:
            raise CreateFailed(f"the container of {spec.sandbox_id} ended at once; its image may not fit this engine")
        self._await_socket(socket, container)
        if os.getuid() == 0:
            os.chown(socket.parent, 0, 0)  # the agent has its socket; tools have no more business here
        pid = int(facts["State"]["Pid"])
        return Handle(
            driver=self.name, sandbox_id=spec.sandbox_id, session_id=spec.session_id, socket=str(socket), pid=pid,
            start=host.start_time(pid), boot=host.boot_id(), epoch=spec.epoch, limits=spec.limits, token=token,
            extra=MappingProxyType({
                **spec.labels, "tenant": spec.tenant_id, "container": container,
                "environment": json.dumps(dict(runnable.environment)),
            }),
        )  # fmt: skip

    def _await_socket(self, socket: Path, container: str) -> None:
        deadline = time.monotonic() + START_S
        for attempt in itertools.count(1):
            try:
                connected = unix_connect(socket)
                if connected is not None:
                    connected.close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise CreateFailed("the agent did not listen in time") from None
            facts = self.engine.inspect(container) if attempt % 100 == 0 else None
            if facts is not None and not facts["State"]["Running"]:
                raise CreateFailed(f"the agent ended with exit code {facts['State']['ExitCode']} before it listened")
            time.sleep(0.005)

    def _container(self, sandbox_id: str) -> str:
        return f"tenuto-{self.home}-{sandbox_id}"

    async def attach(self, handle: Handle, epoch: int | None = None) -> Sandbox:
        if not await host.settled(handle):
            raise SandboxLost(f"the sandbox {handle.sandbox_id} is gone: its agent no longer runs")
        return await Sandbox(handle, epoch).open()

    async def release(self, handle: Handle) -> None:
        """Where the engine hangs, the container's processes are killed without it and its remains are quarantined."""
        await asyncio.to_thread(self._release, handle)

    def _release(self, handle: Handle) -> None:
        dead = False
        if handle.boot == host.boot_id():
            with suppress(PermissionError):
                dead = host.end(handle.pid, handle.start)
        try:
            self._remove(handle.sandbox_id)
        except SandboxFailure:
            if not dead:
                raise

    async def found(self) -> list[str]:
        return await asyncio.to_thread(self._found)

    def _found(self) -> list[str]:
        form = f'{{{{.Label "{LABEL}.sandbox"}}}}'
        listed = self.engine.ask("ps", "--all", "--filter", f"label={LABEL}.home={self.home}", "--format", form)
        living = {sandbox_id for sandbox_id, _, _ in host.agents(self.home)}
        return sorted({*self.records, *listed.split(), *host.uid_owners(self.home), *living})

    async def reap(self, live: Collection[str], among: Collection[str] | None = None) -> list[str]:
        return await asyncio.to_thread(self._reap, frozenset(await self.found() if among is None else among), live)

    def _reap(self, known: frozenset[str], live: Collection[str]) -> list[str]:
        dead = []
        for sandbox_id in sorted(known.difference(live)):
            try:
                self._remove(sandbox_id)
            except SandboxFailure:
                continue  # quarantined: named in `describe`, tried again at the next reap
            dead.append(sandbox_id)
        return dead

    def _remove(self, sandbox_id: str) -> None:
        """Removes the container whatever its state. One that the engine cannot remove in time is quarantined."""
        groups: list[str] = []
        try:
            facts = self.engine.inspect(self._container(sandbox_id))
            groups = cgroups.of_container(facts["Id"]) if facts is not None and os.getuid() == 0 else []
            self.engine.ask("rm", "--force", "--volumes", self._container(sandbox_id))
        except SandboxFailure as error:
            if "no such" not in str(error).lower():
                self.quarantined.add(sandbox_id)
                raise
        groups += self._end_forgotten(sandbox_id)
        self.quarantined.discard(sandbox_id)
        cgroups.remove(groups)  # gone already, but where the engine was killed while it made or removed the container
        host.return_uid(self.home, sandbox_id)
        self.records.remove(sandbox_id)

    def _end_forgotten(self, sandbox_id: str) -> list[str]:
        """An engine that was killed may come back without a container that lives on: ends it, and names its groups."""
        living = [pid for found, pid, _ in host.agents(self.home) if found == sandbox_id]
        if not living or os.getuid() != 0:  # an engine of somebody else's is out of our reach
            return []
        groups = [group for pid in living for group in cgroups.of_container(cgroups.container_of(pid))]
        try:
            host.end_agents(self.home, sandbox_id)
        except SandboxFailure:
            self.quarantined.add(sandbox_id)
            raise
        return groups

    async def describe(self) -> Description:
        names: Sequence[str] = ("memory_bytes", "pids", "cpu")
        notes = ["no network; nothing of the host is visible but the image and declared volumes"]
        notes += [f"it cannot stop {each}" for each in unstopped.crash_handler()]
        if self.quarantined:
            notes.append(f"quarantined, the engine does not remove them: {', '.join(sorted(self.quarantined))}")
        return Description(
            backend=self.name,
            isolation=self.isolation,
            limits_enforced=MappingProxyType({
                **dict.fromkeys(names, "cgroup by Docker"),
                "workspace_bytes": "tmpfs size",
                "tmp_bytes": "tmpfs size",
                "output_bytes": "agent",
                "call_timeout_s": "agent",
            }),
            notes=tuple(notes),
        )  # fmt: skip
