"""A Docker engine of our own: another may be in use, and this one is killed. containerd is a service of its own, as it
is where Docker is installed, and containers live on while dockerd is away."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.supervisor import die_with

_START_S = 60.0


class Dockerd:
    """`base` holds everything of it. `live_restore`: its containers go on while it is away."""

    def __init__(self, base: Path, live_restore: bool = True) -> None:
        self._base = base
        self._live_restore = live_restore
        self._containerd = f"{base}/containerd.sock"
        self.address = f"unix://{base}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    @contextlib.contextmanager
    def containerd(self) -> Iterator[None]:
        words = ["--root", f"{self._base}/ctr", "--state", f"{self._base}/ctr-state", "--address", self._containerd]
        process = self._run("containerd", *words)
        try:
            yield
        finally:
            process.terminate()
            process.wait(_START_S)

    def start(self) -> None:
        words = ["--data-root", f"{self._base}/data", "--exec-root", f"{self._base}/exec", "-p", f"{self._base}/pid"]
        words += ["--cgroup-parent", f"/{self.name}"]  # told apart from another engine's
        words += ["-H", self.address, "--containerd", self._containerd, "--iptables=false", "--bridge=none"]
        self._process = self._run("dockerd", *words, *(["--live-restore"] if self._live_restore else []))

    def _run(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._base / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGTERM),
            )

    def answers(self, patience_s: float = _START_S) -> bool:
        ask = f"until docker -H {self.address} version >/dev/null 2>&1; do sleep 0.1; done"
        try:
            return subprocess.run(["sh", "-c", ask], timeout=patience_s, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def forget(self, container: str) -> None:
        """While it is dead: what it knows of a container, by its whole id."""
        shutil.rmtree(self._base / "data" / "containers" / container)

    def stop(self) -> None:
        if self.pid is None:
            return
        clear = f"docker -H {self.address} ps -aq | xargs -r docker -H {self.address} rm --force --volumes"
        subprocess.run(["sh", "-c", clear], capture_output=True, timeout=_START_S, check=False)
        assert self._process is not None
        self._process.terminate()
        self._process.wait(_START_S)


def groups_below(parent: str) -> list[Path]:
    """The control groups that an engine with this parent made, the innermost first, and the parent itself."""
    return sorted(Path("/sys/fs/cgroup").glob(f"*/{parent}/**/"), reverse=True)


@contextlib.contextmanager
def own_dockerd(*, live_restore: bool = True) -> Iterator[Dockerd | None]:
    """None where we may not start one."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("containerd", "dockerd", "docker"))):
        yield None
        return
    base = Path(tempfile.mkdtemp(prefix="tenuto-dockerd-"))
    engine = Dockerd(base, live_restore)
    try:
        with engine.containerd():
            engine.start()
            try:
                yield engine if engine.answers() else None
            finally:
                engine.stop()
    finally:
        subprocess.run(["umount", "--lazy", str(base / "data")], capture_output=True, check=False)  # dockerd's own
        shutil.rmtree(base, ignore_errors=True)
        for folder in groups_below(base.name):
            with contextlib.suppress(OSError):
                folder.rmdir()
