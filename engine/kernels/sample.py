"""Calls of the kernels with known answers: what the tests, the compile gate and the benches run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import engine.kernels

Size = Literal["tiny", "real"]  # tiny: at most 32 programs, for the interpreter; real: the shapes of production


@dataclass(frozen=True)
class Sample:
    """One call of a kernel's launch function on tensors of its own.

    launch:      makes the call
    worst:       makes the call and returns the largest error against the float64 meaning
    bound:       what `worst` may return at most
    moved_bytes: what the call must read and write at least; 0 where bandwidth says nothing
    wants:       instruction classes by arch that the compiled kernels must contain, such as `mma.sync` or `cp.async`
    """

    name: str
    launch: Callable[[], None]
    worst: Callable[[], float]
    bound: float
    moved_bytes: int = 0
    wants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def kernel_names() -> list[str]:
    """The modules of this package that hold a kernel with samples. What mends the interpreter is not for GPUs."""
    names = sorted(module.name for module in pkgutil.iter_modules(engine.kernels.__path__))
    return [name for name in names if name != "interpreter" and hasattr(_module(name), "samples")]


def samples_of(kernel: str, size: Size) -> list[Sample]:
    """The samples of one kernel. Their tensors live as long as they do."""
    made: list[Sample] = _module(kernel).samples(size)
    return made


def every_sample(size: Size) -> Iterator[tuple[str, Sample]]:
    """Kernel by kernel, so that only one kernel's tensors need be held at a time."""
    for kernel in kernel_names():
        for sample in samples_of(kernel, size):
            yield kernel, sample


def _module(name: str) -> Any:
    return importlib.import_module(f"engine.kernels.{name}")
