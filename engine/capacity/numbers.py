"""In which numbers weights and KV can be kept, and what one takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from engine.errors import PlanError

# Bits of one weight, scales included: int4 has a scale of 16 bits for 128 weights (AWQ, GPTQ, and engine.kernels.int4),
# mxfp4 one of 8 bits for 32 (OCP Microscaling Formats 1.0), nvfp4 one of 8 bits for 16. The scales of fp8 and int8 are
# one for a row or a block of 128 x 128, which is nothing.
WEIGHT_BITS: Final = {
    "fp32": Fraction(32),
    "bf16": Fraction(16),
    "fp16": Fraction(16),
    "fp8": Fraction(8),
    "int8": Fraction(8),
    "nvfp4": Fraction(9, 2),
    "mxfp4": Fraction(17, 4),
    "int4": Fraction(33, 8),
}
KV_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_SPELT: Final = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "e4m3": "fp8",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "w4a16": "int4",
    "w8a16": "fp8",
    "w8a8": "fp8",
}


def weight_bytes(count: int, dtype: str) -> int:
    """Bytes of so many weights, scales included, rounded up."""
    return int(-(-count * WEIGHT_BITS[dtype] // 8))


def weights_dtype(key: str, name: str) -> str:
    """A known name for it. Raises PlanError."""
    return _known(key, name, tuple(WEIGHT_BITS))


def kv_dtype(key: str, name: str) -> str:
    """A known name for it. Raises PlanError."""
    return _known(key, name, tuple(KV_BYTES))


def _known(key: str, name: str, known: tuple[str, ...]) -> str:
    found = _SPELT.get(name.lower(), name.lower())
    if found not in known:
        raise PlanError(key, f"{name[:40]!r} is not a known number; there are {', '.join(known)}")
    return found
