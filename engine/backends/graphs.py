"""Work that is recorded once and replayed without Python: a CUDA graph, or its stand-in where kernels are interpreted.

The stand-in holds what a graph holds: operators and kernel launches with the very tensors, grids and numbers they were
recorded with. A replay runs them again. It refuses what a graph refuses: waiting for the device, and reading host
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.errors import EngineFault

_REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "aten.equal", "lift_fresh")


class CaptureFault(EngineFault):
    """A step did something that a recorded step cannot repeat."""


class Graph(Protocol):
    """What was recorded. `result` is the tensor that a replay fills anew."""

    result: Tensor

    def replay(self) -> None: ...


class CudaGraphs:
    """Records CUDA graphs; all share one pool of memory, so the largest is to be recorded first."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Graph:
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # compiles kernels and makes handles, which a recording must not
                work()
        self._stream.synchronize()
        return _CudaGraph(work, self._pool, self._stream)


class _CudaGraph:
    def __init__(self, work: Callable[[], Tensor], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads copy pages meanwhile, which a recording of the whole process would forbid.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.result = work()

    def replay(self) -> None:
        self._graph.replay()


class Recordings:
    """Records operators and interpreted launches."""

    def record(self, work: Callable[[], Tensor]) -> Graph:
        recorder = _Recorder()
        with recorder, _launches(recorder.calls):
            result = work()
        return _Recording(recorder.calls, result)


class _Recording:
    def __init__(self, calls: list[Callable[[], None]], result: Tensor) -> None:
        self._calls, self.result = calls, result

    def replay(self) -> None:
        for call in self._calls:
            call()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operator with its tensors; replayed, what it returned before is filled with what it returns now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(refused in name for refused in _REFUSED) or ("aten.index" in name and _is_masked(args)):
            raise CaptureFault(f"a captured step waits for the device or reads host memory: {name}")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        view = isinstance(out, Tensor) and not func._schema.is_mutable and any(_same_memory(out, a) for a in args)
        if not view and "aten.empty" not in name:  # those are the same memory still, whatever is in it
            self.calls.append(lambda: _again(func, args, kwargs, out))
        return out


def _is_masked(args: Any) -> bool:
    """Whether an index is a mask, whose size the host would have to know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _same_memory(out: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and out.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    now = func(*args, **kwargs)
    if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
        before.copy_(now)


class _launches:
    """Keeps launches of interpreted kernels in `calls`, beside running them."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self._calls, self._kind, self._run = calls, InterpretedFunction, InterpretedFunction.run

    def __enter__(self) -> None:
        calls, run = self._calls, self._run

        def kept(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(lambda: run(kernel, *args, **kwargs))
            with _disable_current_modes():  # what the interpreter does inside is the kernel's
                return run(kernel, *args, **kwargs)

        self._kind.run = kept

    def __exit__(self, *_: object) -> None:
        self._kind.run = self._run
