"""What kernels are compiled for: the target as Triton names it, and the shared memory that a program may have there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    backend: str
    arch: int | str
    warp: int
    shared_bytes: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),
    "sm_90": Target("cuda", 90, 32, 227 << 10),
    "sm_100": Target("cuda", 100, 32, 227 << 10),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),
}
