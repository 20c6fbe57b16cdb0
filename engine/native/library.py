"""The C interface of the decoder over ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_int64, c_void_p

import numpy as np

from engine.errors import ArrivalFailed, BackendUnavailable, EngineFault
from engine.facts import ModelFacts
from engine.native.build import Built
from engine.native.structs import (
    FORMATS,
    JOBS,
    Array,
    Job,
    JobEntry,
    Shape,
    Source,
    Step,
    StepArrays,
    address,
    shape_of,
    source_of,
    step_of,
)

INSTRUCTION_SETS = ("plain", "avx2", "avx512bf16", "avx512vnni")  # in the order of Isa; each holds those before it
_DIARY_JOBS = 65_536
_NEVER_CAME = 2
_CALLS = {
    "best_isa": ([], c_int),
    "open": ([POINTER(Shape), POINTER(Source), c_int, c_int], c_void_p),
    "close": ([c_void_p], None),
    "run": ([c_void_p, POINTER(Step)], c_int),
    "land": ([c_void_p, c_int], None),
    "capture": ([c_void_p, POINTER(Step), c_int], c_void_p),
    "replay": ([c_void_p], c_int),
    "release": ([c_void_p], None),
    "watch": ([c_void_p, POINTER(JobEntry), c_int], None),
    "watched": ([c_void_p], c_int),
    "allocations": ([], c_int64),
    "narrow": ([c_int, c_int, c_void_p, c_int, c_void_p], None),
    "product": ([*(c_int,) * 3, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p], None),
}


class Library:
    """A loaded library. Raises BackendUnavailable where the system will not load it."""

    def __init__(self, built: Built) -> None:
        try:
            self.calls = ctypes.CDLL(str(built.path))
        except OSError as error:
            raise BackendUnavailable(f"{built.path} cannot be loaded: {error}") from error
        self.key = built.key
        for name, (takes, gives) in _CALLS.items():
            call = getattr(self.calls, f"tenuto_{name}")
            call.argtypes, call.restype = takes, gives

    @property
    def best_instruction_set(self) -> str:
        """The best of INSTRUCTION_SETS that this machine runs."""
        return INSTRUCTION_SETS[int(self.calls.tenuto_best_isa())]

    @property
    def allocations(self) -> int:
        """How often the library has asked for memory, on any thread."""
        return int(self.calls.tenuto_allocations())

    def land(self, landed: Array, layers: int) -> None:
        """So many layers have come, with everything that was read before this call; or, if negative, never will."""
        self.calls.tenuto_land(address(landed), layers)

    def activations(self, isa: str, values: Array) -> Array:
        """fp32 [rows, inputs] as w4a8 multiplies them: uint32 [rows, groups * 10], as kernels.h describes."""
        out = np.zeros((len(values), values.shape[1] // 32 * 10), np.uint32)
        for row, to in zip(values, out, strict=True):
            self.calls.tenuto_narrow(*_kernels(isa), address(row), len(row), address(to))
        return out

    def product(self, isa: str, kind: int, activations: Array, panel: Array) -> Array:
        """Activations by one w4a8 panel, given as its bytes: fp32 [rows, 32]."""
        rows, stride = activations.shape
        out = np.zeros((rows, 32), np.float32)
        given = (address(activations), stride, rows, address(panel), stride // 10, address(out))
        self.calls.tenuto_product(*_kernels(isa), kind, *given)
        return out


class Decoder:
    """A decoder in C++ and the arrays that it uses where they lie. Not thread-safe.

    `arrays`: the model's weights by name in `dtype`, and `cos` and `sin`, each [context, d/2] in fp32. Raises
    EngineFault where memory is short.
    """

    def __init__(
        self, library: Library, facts: ModelFacts, dtype: str, arrays: dict[str, Array], isa: str, threads: int
    ) -> None:
        self.library = library
        self._calls = library.calls
        self._kept = arrays
        shape, source = shape_of(facts, dtype), source_of(facts, arrays)
        self._handle = self._calls.tenuto_open(byref(shape), byref(source), INSTRUCTION_SETS.index(isa), threads)
        if not self._handle:
            raise EngineFault("there is not enough memory for the packed weights; use a smaller model")

    def run(self, pool: int, step: StepArrays, landed: Array | None = None) -> None:
        """Run one step over the pages that begin at address `pool`. The interpreter's lock is free meanwhile.

        `landed`: a count for `Library.land`, of layers that the step may read. Raises ArrivalFailed where they do not
        come.
        """
        outcome = self._calls.tenuto_run(self._handle, byref(step_of(pool, step, landed)))
        if outcome == _NEVER_CAME:
            raise ArrivalFailed("pages that a step was to read did not come")
        if outcome:
            raise EngineFault(f"there was not enough memory for a step of {len(step.tokens)} tokens")

    def capture(self, pool: int, step: StepArrays, pages: int) -> Captured:
        """A decode step over these very arrays, to be replayed; contexts have up to `pages` pages."""
        return Captured(self, pool, step, pages)

    @contextmanager
    def watch(self) -> Iterator[list[Job]]:
        """The jobs dispatched inside, in order; they are in the list at the end."""
        jobs: list[Job] = []
        diary = (JobEntry * _DIARY_JOBS)()
        self._calls.tenuto_watch(self._handle, diary, _DIARY_JOBS)
        try:
            yield jobs
        finally:
            count = self._calls.tenuto_watched(self._handle)
            self._calls.tenuto_watch(self._handle, None, 0)
            for entry in diary[:count]:
                jobs.append(Job(JOBS[entry.kind], entry.layer, entry.source or 0, entry.target or 0, entry.items))

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._handle = None
            self._calls.tenuto_close(handle)


class Captured:
    """A captured step of a decoder, which it keeps alive. Raises EngineFault where memory is short."""

    def __init__(self, decoder: Decoder, pool: int, step: StepArrays, pages: int) -> None:
        self._decoder = decoder
        self._calls = decoder.library.calls
        self._arrays = step
        self._step = step_of(pool, step)
        self._handle = self._calls.tenuto_capture(decoder._handle, byref(self._step), pages)
        if not self._handle:
            raise EngineFault(f"there is not enough memory to capture a step of {len(step.tokens)} rows")

    def replay(self, rows: int) -> None:
        """Run the first rows of the arrays. The interpreter's lock is free meanwhile."""
        self._step.token_count = self._step.tile_count = self._step.wanted_count = rows
        if self._calls.tenuto_replay(self._handle):
            raise EngineFault(f"there was not enough memory for a decode step of {rows} rows")

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._handle = None
            self._calls.tenuto_release(handle)


def _kernels(isa: str) -> tuple[int, int]:
    return INSTRUCTION_SETS.index(isa), FORMATS.index("w4a8")
