"""Compiles, for one target and with no GPU, what the kernels' own launch functions launch. A process of its own.

    python -m bench.kernel_compile sm_90 --kernel paged_decode

A driver that only says which target it is makes Triton specialise and compile every call as it would on that GPU; the
kernels are then not run. Prints a JSON line for each sample of each kernel, and for whole steps of models:

    {"kernel", "sample", "target", "triton", "refused": sentence or null, "failed": the compiler's error or null,
     "missing": classes wanted and not there, "unsaid": kernels launched with no word on `enable_fp_fusion`,
     "compiled": [{"name", "registers", "shared_bytes", "spills", "instructions"}]}

Triton prints assembly that its assembler refuses, so other lines may stand between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITFunction

from bench.evidence import Line
from bench.kernel_resources import Resources, resources
from bench.kernel_steps import STEPS, steps
from bench.kernel_targets import TARGETS, Target
from engine.errors import BackendUnavailable
from engine.kernels.sample import Sample, kernel_names, samples_of

# What a sabotage does to every launch; each is a mistake that a configuration can make.
SABOTAGES: dict[str, dict[str, int]] = {
    "spill": {"num_warps": 1},
    "smem": {"num_stages": 16},
    "instruction": {"num_stages": 1},
}


@dataclass(frozen=True)
class Launched:
    """`says_fusion`: the launch says whether products and sums may be fused, which versions of Triton differ in."""

    name: str
    compiled: Any
    says_fusion: bool


class NoDevice:
    """A driver of a target that is not there."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(target: Target, options: dict[str, int]) -> Iterator[list[Launched]]:
    """Within it a launch compiles and does nothing else. Yields the list of what was launched as it grows."""
    launched: list[Launched] = []
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = plain(self, *args, grid=grid, warmup=True, **{**kwargs, **options})
        launched.append(Launched(self.fn.__module__.rpartition(".")[2], compiled, "enable_fp_fusion" in kwargs))
        return compiled

    driver.set_active(NoDevice(target))
    JITFunction.run = run
    try:
        yield launched
    finally:
        JITFunction.run = plain


def compiled_samples(name: str, kernels: Sequence[str], sabotage: str | None, kept: Path) -> Iterator[Line]:
    known: dict[str, Resources] = {}  # a kernel is compiled once, however many samples launch it
    with compiling(TARGETS[name], SABOTAGES[sabotage] if sabotage else {}) as launched:
        for kernel in kernels:
            for sample in steps() if kernel == STEPS else samples_of(kernel, "real"):
                launched.clear()
                refused, failed = _problem(sample.launch)
                taken = {one.compiled.hash: one for one in launched}
                known |= {key: resources(one.compiled, kept) for key, one in taken.items() if key not in known}
                yield {
                    "kernel": kernel,
                    "sample": sample.name,
                    "target": name,
                    "triton": triton.__version__,
                    "refused": refused,
                    "failed": failed,
                    "missing": [] if refused or failed else _missing(sample, name, taken.values()),
                    "unsaid": sorted({one.name for one in launched if not one.says_fusion}),
                    "compiled": [{"name": one.name, **asdict(known[key])} for key, one in taken.items()],
                }


def _problem(launch: Callable[[], None]) -> tuple[str | None, str | None]:
    """(why the launch function itself does not take this target, what the compiler says)."""
    try:
        launch()
    except BackendUnavailable as error:
        return str(error), None
    except (TritonError, RuntimeError) as error:  # the passes of the compiler raise the latter
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[-200:] if isinstance(error, CompilationError) else text[:300]}"
    return None, None


def _missing(sample: Sample, target: str, launched: Iterable[Launched]) -> list[str]:
    text = "\n".join(str(one.compiled.asm.get("ptx", one.compiled.asm.get("amdgcn"))) for one in launched)
    return [wanted for wanted in sample.wants.get(target, ()) if wanted not in text]


@click.command()
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.option("--kernel", "chosen", multiple=True, help="Only this kernel; may be given again.")
@click.option("--sabotage", type=click.Choice(list(SABOTAGES)))
def main(target: str, chosen: tuple[str, ...], sabotage: str | None) -> None:
    """Compile every sample for one target."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for line in compiled_samples(target, chosen or [*kernel_names(), STEPS], sabotage, Path(triton.knobs.cache.dir)):
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
