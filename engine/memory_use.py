"""What an engine takes of the machine: by arithmetic before it starts, and as it is found while it runs. No torch."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from engine.capacity.numbers import weight_bytes
from engine.facts import ModelFacts
from engine.precision import Precision

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60
# What `engine.capacity` calls the numbers that a layer's weights are kept in.
_KEPT = {"bf16": "bf16", "fp32": "fp32", "w4a16": "int4", "w8a16": "fp8", "w8a8": "fp8"}
_W4A8_BYTES = 0.625  # of a weight: those of the file's own blocks of 4 and 5 bits, scales included


@runtime_checkable
class HasDevice(Protocol):
    """What a backend with memory of its own has besides `Backend`."""

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes in use, by whomever, and bytes that there are; None where the device is the host."""
        ...


@dataclass(frozen=True)
class Bill:
    """What an engine takes, by arithmetic. Sizes in bytes; `context` and `pool_tokens` in tokens."""

    weights_bytes: int
    kv_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    pool_tokens: int
    context: int
    parameters: int
    dtype: str
    on_device: bool


def matrices(facts: ModelFacts) -> int:
    """Weights of the layers of a dense model."""
    wide, kv_wide = facts.hidden, facts.kv_heads * facts.head_size
    if facts.mla is None:
        attention = wide * (2 * facts.query_width + 2 * kv_wide)
    else:
        mla, heads = facts.mla, facts.heads
        queries = heads * (mla.nope_size + mla.rope_size)
        attention = wide * queries if mla.q_rank is None else mla.q_rank * (wide + queries)
        attention += wide * (mla.kv_rank + mla.rope_size) + mla.kv_rank * heads * (mla.nope_size + mla.value_size)
        attention += heads * mla.value_size * wide
    return facts.layers * (attention + 3 * wide * facts.ffn)


def ends(facts: ModelFacts) -> int:
    """Weights of the embedding and, unless that is it, of the head."""
    return facts.vocab * facts.hidden * (1 if facts.tied_output else 2)


def bill(facts: ModelFacts, precision: Precision, pool_tokens: int, arena_bytes: int, *, on_device: bool) -> Bill:
    """Of an engine with these settings."""
    kv = facts.kv_bytes_per_token(str(precision))
    weights = weight_bytes(ends(facts), "fp32" if precision.dtype == "fp32" else "bf16")  # those stay as they are read
    if precision.dtype == "w4a8":
        weights += int(matrices(facts) * _W4A8_BYTES)
    else:
        weights += weight_bytes(matrices(facts), _KEPT[precision.dtype])
    count, name = matrices(facts) + ends(facts), str(precision)
    return Bill(weights, kv * pool_tokens, arena_bytes, kv, pool_tokens, facts.context, count, name, on_device)


class MemoryUse:
    """The bill, and what is found beside it."""

    def __init__(self, owed: Bill, backend: object, weights_bytes: int = 0) -> None:
        """`weights_bytes`: what was loaded."""
        self._owed = owed
        self._weights_bytes = weights_bytes
        self._backend = backend
        self._process = psutil.Process()

    def as_message(self) -> dict[str, Any]:
        """`rss_bytes`: of this process, the touched part of the host arena among it (`shared_bytes`)."""
        mine, (there_is, available) = self._process.memory_info(), machine_memory()
        device = self._backend.device_memory() if isinstance(self._backend, HasDevice) else None
        return {
            "bill": asdict(self._owed),
            "weights_bytes": self._weights_bytes,
            "rss_bytes": mine.rss,
            "shared_bytes": getattr(mine, "shared", 0),
            "machine_bytes": there_is,
            "available_bytes": available,
            "device_used_bytes": device[0] if device else None,
            "device_bytes": device[1] if device else None,
        }


def memory_limit() -> int:
    """Bytes that the container may have, as far as it says; more than any machine has where it does not."""
    for name in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            return min(_NO_LIMIT, int(Path(name).read_text()))
    return _NO_LIMIT


def machine_memory() -> tuple[int, int]:
    """Bytes that this machine, or its container, has, and those that could be had now."""
    machine, limit = psutil.virtual_memory(), memory_limit()
    return min(machine.total, limit), min(machine.available, limit)
