"""The ceiling of decode: how fast the same threads can read the same bytes, and do nothing else with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np

from bench.compiled import BenchError, cache_dir, compile_c, load_c

STREAM_BYTES = 512 << 20
# (runs read side by side per thread, bytes prefetched ahead): which is fastest depends on the machine
_WAYS = ((1, 0), (1, 2048), (4, 0), (4, 1024))
_PASSES = 3
Array = np.ndarray[Any, np.dtype[Any]]


class Bandwidth:
    """Two reads: one long array in huge pages, as STREAM reads, and the model's own matrices where they lie."""

    def __init__(self, matrices: Sequence[Array], threads: int) -> None:
        self._calls = load_c(compile_c("bandwidth.c", cache_dir()))
        self._calls.bandwidth_read.argtypes = [c_void_p, c_void_p, *[c_int] * 5, POINTER(c_double)]
        self._calls.bandwidth_read.restype = c_uint64
        self._calls.bandwidth_buffer.argtypes = [c_size_t]
        self._calls.bandwidth_buffer.restype = c_void_p
        self._calls.bandwidth_free.argtypes = [c_void_p]
        self._calls.bandwidth_free.restype = None
        self._matrices = list(matrices)
        self._threads = threads
        self._buffer = self._calls.bandwidth_buffer(STREAM_BYTES)
        if not self._buffer:
            raise BenchError(f"there is no memory for a read of {STREAM_BYTES >> 20} MiB")

    def close(self) -> None:
        self._calls.bandwidth_free(self._buffer)
        self._buffer = None

    def stream(self) -> float:
        """Bytes per second of the long array, the best pass of the best way."""
        return self._best([self._buffer], [STREAM_BYTES])

    def matrices(self) -> float:
        """Bytes per second of the model's matrices, the best pass of the best way."""
        return self._best([array.ctypes.data for array in self._matrices], [array.nbytes for array in self._matrices])

    def _best(self, addresses: list[int], sizes: list[int]) -> float:
        parts = (c_void_p * len(addresses))(*addresses)
        lengths = (c_size_t * len(sizes))(*sizes)
        seconds = (c_double * _PASSES)()
        best = float("inf")
        for streams, ahead in _WAYS:
            shape = (len(addresses), self._threads, _PASSES, streams, ahead)
            self._calls.bandwidth_read(
                ctypes.cast(parts, c_void_p),
                ctypes.cast(lengths, c_void_p),
                *shape,
                ctypes.cast(seconds, POINTER(c_double)),
            )
            best = min(best, *seconds)
        return sum(size // 4096 * 4096 for size in sizes) / best
