"""How fast this machine reads memory and computes: what the device `cpu` is in a plan. Takes about a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from engine.capacity import Device, measured_cpu

_READ_BYTES = 128 << 20
_SIDE = 768
_RUNS = 3


def measure_cpu(clock: Callable[[], float] = time.perf_counter) -> Device:
    """Reads by a maximum over an array that no cache holds, computes by a product of fp32 matrices; the best of three
    runs each. Copies within memory are what a host tier here is."""
    array, threads = np.ones(_READ_BYTES // 4, np.float32), os.cpu_count() or 1
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        read_s = _best(lambda: sum(pool.map(np.max, parts)), clock)
    target = np.empty_like(array)
    copy_s = _best(lambda: np.copyto(target, array), clock)
    left = np.full((_SIDE, _SIDE), 1e-3, np.float32)
    compute_s = _best(lambda: left @ left, clock)
    memory = psutil.virtual_memory().total
    return measured_cpu(memory, _READ_BYTES / read_s, 2 * _SIDE**3 / compute_s, _READ_BYTES / copy_s)


def _best(work: Callable[[], object], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(_RUNS):
        begun = clock()
        work()
        taken.append(clock() - begun)
    return max(min(taken), 1e-9)
