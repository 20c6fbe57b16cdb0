"""The e4m3 format of weights and activations: a scale for each row, and how kernels widen the bytes.

Where the target has no conversion from e4m3 (before sm_89, and gfx942, whose own format is another), kernels take the
bytes and build float16 from their bits: sign, exponent and mantissa moved into place give the value over 256, exactly,
subnormals included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.target import arch

LARGEST = 448.0
_WITHOUT = ("sm_80", "sm_86", "sm_87", "gfx942")  # no conversion from e4m3 in hardware, or from another e4m3


def quantise_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, K] as e4m3 [N, K] and their scales fp32 [N]; value = e4m3 * scale. Values must be finite."""
    largest = values.float().abs().amax(1)
    scale = torch.where(largest > 0.0, largest / LARGEST, 1.0)
    return (values.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def native() -> bool:
    """Whether kernels convert e4m3 in hardware here."""
    return arch() not in _WITHOUT


def as_taken(values: torch.Tensor, natively: bool) -> torch.Tensor:
    """e4m3 as kernels take it: as it is, or as bytes."""
    return values if natively else values.view(torch.uint8)


@triton.jit
def widened(stored, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3, or its bytes where not NATIVE, as KIND (float16, bfloat16 or float32), exactly."""
    if NATIVE:
        values = stored.to(KIND)
    else:
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        values = (half.to(tl.float32) * 256.0).to(KIND)
    return values
