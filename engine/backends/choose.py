"""Which backend runs a model: the one that was asked for, or the best that this machine can build and run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.backends.checks import check_precision
from engine.backends.face import Backend
from engine.errors import BackendUnavailable
from engine.facts import ModelFacts
from engine.precision import Precision
from engine.weights import Weights

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, either under Windows
BACKENDS = ("auto", "triton", "cpu", "torch")


@dataclass(frozen=True)
class BackendSettings:
    """`name` is one of BACKENDS. `cache_dir` holds what is built; None: built for this process alone. `precision` None:
    that of the weights."""

    name: str
    pool_blocks: int
    threads: int
    cache_dir: Path | None
    precision: Precision | None = None


def open_backend(
    settings: BackendSettings, facts: ModelFacts, weights: Weights, progress: Callable[[str, float], None]
) -> Backend:
    """Auto takes triton where there is a GPU for it, cpu where that can be built and the processor has vectors for it,
    else torch, and says why it took no better one.

    Raises BackendUnavailable where one was asked for by name and cannot be had, or is needed for the weights' dtype or
    for the model; RequestError where the device's memory is too small.
    """
    precision = settings.precision or Precision(weights.dtype)
    check_choice(settings, facts, precision)
    if settings.name == "triton" or precision.settings:
        return _triton(settings, facts, weights, progress)
    if settings.name == "auto" and has_gpu():
        try:
            return _triton(settings, facts, weights, progress)
        except BackendUnavailable as reason:
            progress(f"not the triton backend: {reason}", 0.0)
    only_cpu = settings.name == "cpu" or (settings.name == "auto" and weights.dtype == "w4a8")
    if settings.name != "torch":
        try:
            return _cpu(settings, facts, weights, progress)
        except BackendUnavailable as reason:
            if only_cpu:
                raise BackendUnavailable(f"the cpu backend cannot run here: {reason}") from reason
            progress(f"the torch backend, several times slower, as the cpu backend cannot run here: {reason}", 0.0)
    from engine.backends.torch_exact import TorchExact

    progress("packing", 0.0)
    return TorchExact(facts, weights, pool_blocks=settings.pool_blocks, threads=settings.threads)


def refuse_early(name: str, facts: ModelFacts, precision: Precision) -> None:
    """Raises BackendUnavailable for what can be known before weights are read: no GPU where one was asked for by name,
    or a model that its kernels do not run."""
    if name != "triton":
        return
    _triton_imported()
    from engine.backends.gpu_device import open_device
    from engine.backends.gpu_model import check_model

    open_device()
    check_model(facts, precision)


def _triton_imported() -> None:
    try:
        import triton  # noqa: F401 (whether it can be)
    except ImportError as error:
        raise BackendUnavailable(
            f"Triton is not installed ({error}): it comes with a CUDA build of PyTorch, or with the extra gpu"
        ) from error


def check_choice(settings: BackendSettings, facts: ModelFacts, precision: Precision) -> None:
    """Raises BackendUnavailable where the backend's name is none, or where a precision that only a GPU has is asked of
    another backend, of a machine without one, or for a model that does not have it. Nothing is loaded for this."""
    if settings.name not in BACKENDS:
        raise BackendUnavailable(f"there is no backend {settings.name!r}; there are {', '.join(BACKENDS)}")
    if not precision.settings:
        return
    if settings.name not in ("auto", "triton"):
        raise BackendUnavailable(f"{precision.settings} needs the triton backend, and {settings.name} was asked for")
    if settings.name == "auto" and not has_gpu():
        raise BackendUnavailable(
            f"{precision.settings} needs a GPU, and PyTorch sees none: set --dtype bf16 and --kv-dtype auto"
        )
    check_precision(facts, precision)


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU; says nothing of whether it can be used. It is not imported where none can be."""
    if not any(map(os.path.exists, _GPU_DEVICES)):
        return False
    import torch

    return bool(torch.cuda.is_available())


def _triton(
    settings: BackendSettings, facts: ModelFacts, weights: Weights, progress: Callable[[str, float], None]
) -> Backend:
    _triton_imported()
    from engine.backends.triton import Triton

    progress("loading onto the GPU", 0.0)
    return Triton(facts, weights, pool_blocks=settings.pool_blocks, precision=settings.precision)


def _cpu(
    settings: BackendSettings, facts: ModelFacts, weights: Weights, progress: Callable[[str, float], None]
) -> Backend:
    from engine.backends.cpu import Cpu, unsupported
    from engine.native import Library, build

    reason = unsupported(facts, weights.dtype)
    if reason is not None:
        raise BackendUnavailable(reason)
    with _directory(settings.cache_dir) as directory:
        built = build(directory, lambda done: progress("building the kernels", done))
        library = Library(built)
    if settings.name == "auto" and weights.dtype != "w4a8" and library.best_instruction_set == "plain":
        raise BackendUnavailable("the processor has neither AVX-512 nor AVX2")
    progress("packing", 0.0)
    return Cpu(facts, weights, library=library, pool_blocks=settings.pool_blocks, threads=settings.threads)


@contextlib.contextmanager
def _directory(cache_dir: Path | None) -> Iterator[Path]:
    """The cache's directory for builds, or one that lasts until the library is loaded."""
    if cache_dir is not None:
        yield cache_dir / "native"
        return
    with tempfile.TemporaryDirectory(prefix="tenuto-native-") as directory:
        yield Path(directory)
