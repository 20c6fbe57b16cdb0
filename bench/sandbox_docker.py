"""What `bench.sandbox` compares with: the same image, the same hardening, by the docker command alone."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from sandbox import SandboxSpec
from sandbox.docker import DockerDriver
from sandbox.images import Runnable

FIRST = "print('first')"


@dataclass
class Beside:
    """One container of our own image whose writable layer holds the workspace, and whatever else is asked for."""

    driver: DockerDriver
    fill: str  # Python that fills /work
    container: str = ""
    made: list[str] = field(default_factory=list)

    @property
    def own(self) -> Runnable:
        return self.driver.own

    def __enter__(self) -> Beside:
        first = f"tenuto-bench-{uuid.uuid4().hex[:8]}"
        base = f"tenuto-bench:{uuid.uuid4().hex[:8]}"
        words = ["--pull", "never", "--network", "none", "--user", "0", "--entrypoint", self.own.words[0]]
        self.made = [first, base]
        docker("run", "--name", first, *words, self.own.tag, "-c", self.fill)
        docker("commit", first, base)
        self.container = f"tenuto-bench-{uuid.uuid4().hex[:8]}"
        self.made.append(self.container)
        docker("run", "--detach", "--name", self.container, *words, base, "-c", "import time; time.sleep(100000)")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.container, self.made[0]):
            subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
        subprocess.run(["docker", "rmi", "--force", self.made[1]], capture_output=True, check=False)

    def run(self, spec: SandboxSpec, control: Path) -> float:
        """Seconds from `docker run` to the first byte of what it runs, hardened as the driver hardens."""
        words = self.driver._options(spec, self.own, control, os.getuid() or 200_000)
        head = words[: words.index(self.own.tag) + 1]
        begun = time.perf_counter()
        with subprocess.Popen(["docker", "run", "--rm", *head, "-c", FIRST], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if process.stdout.read(1) != b"f":
                raise RuntimeError("docker run printed nothing")
            return time.perf_counter() - begun

    def call(self) -> tuple[float, bool]:
        begun = time.perf_counter()
        answer = docker("exec", self.container, "sh", "-c", "echo hi")
        return time.perf_counter() - begun, answer == b"hi\n"

    def change(self, code: str) -> None:
        docker("exec", self.container, "python3", "-c", code)

    def commit(self) -> float:
        name = f"tenuto-bench:{uuid.uuid4().hex[:8]}"
        begun = time.perf_counter()
        docker("commit", self.container, name)
        took = time.perf_counter() - begun
        docker("rmi", name)
        return took


def docker(*words: str) -> bytes:
    """Standard output. Raises RuntimeError with what the engine said."""
    answer = subprocess.run(["docker", *words], capture_output=True, timeout=300, check=False)
    if answer.returncode != 0:
        raise RuntimeError(f"docker {words[0]}: {answer.stderr.decode(errors='replace').strip()[-300:]}")
    return answer.stdout
