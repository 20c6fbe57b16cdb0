"""Devices by name, with figures that their makers publish; and what is measured of one that nobody publishes."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from engine.errors import PlanError

CPU: Final = "cpu"
_DISK: Final = "nvme"


@dataclass(frozen=True)
class Device:
    """One device. `hbm_bytes` of memory read at `hbm_bps`; `bf16_flops` and the others dense, per second; 0: it has
    no such units. `link_bps`: to its neighbours in a `domain` of so many, both ways together, as makers count;
    `host_bps`: to host memory, one way; `node`: how many a machine has. `price_per_hour` 0: not known.
    """

    id: str
    name: str
    hbm_bytes: int
    hbm_bps: float
    bf16_flops: float
    fp8_flops: float
    int8_flops: float
    link_bps: float
    host_bps: float
    node: int
    domain: int
    source: str
    price_per_hour: float = 0.0

    def peak_flops(self, dtype: str) -> float:
        """Of matrices in this number, per second; what has no units of its own is computed in bf16."""
        own = {"fp8": self.fp8_flops, "int8": self.int8_flops}.get(dtype, 0.0)
        return own or self.bf16_flops


@dataclass(frozen=True)
class Disk:
    """One NVMe drive: bytes per second each way, sequential."""

    name: str
    read_bps: float
    write_bps: float
    source: str


def devices() -> tuple[Device, ...]:
    """Every device with published figures, by name."""
    return tuple(_device(key, row) for key, row in sorted(_table().items()) if key != _DISK)


def disk() -> Disk:
    row = _table()[_DISK]
    return Disk(row["name"], row["read_bps"], row["write_bps"], row["source"])


def device_named(name: str, measured: Device | None = None) -> Device:
    """By its id or name, however it is written; `measured`: what `cpu` is. Raises PlanError."""
    wanted = _plain(name)
    if wanted == CPU:
        if measured is None:
            raise PlanError("device", "cpu is measured on the machine that it is: ask `tenuto plan --device cpu` there")
        return measured
    known = {_plain(one.id): one for one in devices()} | {_plain(one.name): one for one in devices()}
    known |= {alias: known[of] for alias, of in _ALIASES.items()}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, 1)
    meant = f"; did you mean {known[near[0]].id}?" if near else ";"
    ids = ", ".join(one.id for one in devices())
    raise PlanError("device", f"{name[:40]!r} is not known{meant} there are {ids} and cpu")


_ALIASES: Final = {
    "a100": "a10080",
    "a10080gb": "a10080",
    "h10080": "h100",
    "h10080gb": "h100",
    "h100sxm": "h100",
    "gb200": "gb200nvl72",
    "4090": "rtx4090",
}


def measured_cpu(memory_bytes: int, bps: float, flops: float, copy_bps: float) -> Device:
    """This machine as a device, from its memory, how fast it reads it, what it computes and how fast it copies."""
    if not all(math.isfinite(one) and one > 0 for one in (memory_bytes, bps, flops, copy_bps)):
        raise PlanError("device", "this machine could not be measured")
    return Device(CPU, "this machine", memory_bytes, bps, flops, 0.0, 0.0, copy_bps, copy_bps, 1, 1, "measured now")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("engine.capacity").joinpath("devices.toml").read_text(encoding="utf-8"))


def _device(key: str, row: Mapping[str, Any]) -> Device:
    flops = row["flops"]
    return Device(
        id=key,
        name=row["name"],
        hbm_bytes=int(row["hbm_bytes"]),
        hbm_bps=row["hbm_bps"],
        bf16_flops=flops["bf16"],
        fp8_flops=flops.get("fp8", 0.0),
        int8_flops=flops.get("int8", 0.0),
        link_bps=row["link_bps"],
        host_bps=row["host_bps"],
        node=row["node"],
        domain=row["domain"],
        source=row["source"],
        price_per_hour=row.get("price_per_hour", 0.0),
    )
