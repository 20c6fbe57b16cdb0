"""Every kernel on the device: how fast the device copies, whether each sample computes what it means, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bench.gpu_course import Course
from engine.kernels.sample import Sample, kernel_names, samples_of
from engine.kernels.target import arch

_COPY_BYTES = 2 << 30
_LINK_BYTES = 256 << 20
_SAMPLE_S = 10.0  # the most that one sample is expected to take


def about(course: Course) -> None:
    if course.dry:
        from engine.kernels import interpreter

        interpreter.apply()
    gpu = None if course.dry else torch.cuda.get_device_properties(0)
    course.say(
        "about",
        dry=course.dry,
        arch=arch(),
        gpu=gpu.name if gpu else None,
        memory_bytes=gpu.total_memory if gpu else None,
        processors=gpu.multi_processor_count if gpu else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=triton.__version__,
    )


def copies(course: Course) -> None:
    """On the device, and from and to pinned host memory."""
    size = 1 << 16 if course.dry else _COPY_BYTES
    source = torch.zeros(size, dtype=torch.int8, device=course.device)
    target = torch.empty_like(source)
    course.say("copy", bytes=size, seconds=course.timed(lambda: target.copy_(source)))
    part = min(size, _LINK_BYTES)
    host = torch.zeros(part, dtype=torch.int8, pin_memory=not course.dry)
    for way, to, of in (("out", host, source[:part]), ("in", target[:part], host)):
        seconds = course.timed(lambda to=to, of=of: to.copy_(of, non_blocking=True), 10)  # type: ignore[misc]
        course.say("link", way=way, bytes=part, seconds=seconds)


def kernels(course: Course) -> None:
    """Correctness and speed, kernel by kernel; tensors of one kernel are there at a time."""
    broken = course.sabotage == "wrong-kernel"
    for kernel in course.kernels or kernel_names():
        if not course.enough_time(kernel, _SAMPLE_S):
            continue
        course.part(kernel, 0.0, lambda kernel=kernel: _kernel(course, kernel, broken))  # type: ignore[misc]


def _kernel(course: Course, kernel: str, broken: bool) -> None:
    for sample in samples_of(kernel, "tiny" if course.dry else "real"):
        with corrupted() if broken else _as_it_is():
            worst = sample.worst()
        course.say("check", kernel=kernel, sample=sample.name, worst=worst, bound=sample.bound)
        if sample.moved_bytes:
            _speed(course, kernel, sample)


def _speed(course: Course, kernel: str, sample: Sample) -> None:
    seconds = course.timed(sample.launch)
    course.say("speed", kernel=kernel, sample=sample.name, bytes=sample.moved_bytes, seconds=seconds)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def corrupted() -> Iterator[None]:
    """Sabotage: every launch leaves one wrong number in each tensor that it writes."""
    plain = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def broken(kind: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in args if isinstance(arg, torch.Tensor)]
            tensors = list({tensor.data_ptr(): tensor for tensor in given}.values())
            before = [tensor.clone() for tensor in tensors]
            done = plain[kind](self, *args, **kwargs)
            for tensor, was in zip(tensors, before, strict=True):
                _spoil(tensor, was)
            return done

        return run

    for kind in plain:
        kind.run = broken(kind)
    try:
        yield
    finally:
        for kind, run in plain.items():
            kind.run = run


def _spoil(tensor: torch.Tensor, was: torch.Tensor) -> None:
    """Change the first byte that was written: the upper one of its element, so that it is no rounding error."""
    width = tensor.element_size()
    now, old = (each.contiguous().view(-1).view(torch.uint8).view(-1, width) for each in (tensor, was))
    changed = (now != old).any(1).nonzero()
    if len(changed):
        at = int(changed[0])
        now[at, -1] ^= 0x1F
        tensor.copy_(now.view(-1).view(tensor.dtype).view(tensor.shape))
