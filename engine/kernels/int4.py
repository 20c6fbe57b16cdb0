"""The packing of 4-bit weights, the same for the vector and the matrix kernel.

Groups of 128 along the input dimension, symmetric: weight = (nibble - 8) * scale of its group. Byte j of a group's 64
holds weight j in its low nibble and weight 64 + j in its high one, so that each nibble of a tile of bytes is a tile of
weights that lie side by side, and none has to change places with another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.errors import UnsupportedShape

GROUP = 128
HALF = 64


def pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K] as bytes uint8 [N, K / 2] and scales bf16 [N, K / 128]. Raises UnsupportedShape."""
    rows, columns = weight.shape
    check_width(columns)
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    reach = torch.maximum(groups.amax(2) / 7.0, -groups.amin(2) / 8.0)
    scale = torch.where(reach > 0.0, reach, 1.0).to(torch.bfloat16)
    nibbles = ((groups / scale.float()[..., None]).round() + 8.0).clamp(0.0, 15.0).to(torch.uint8)
    packed = nibbles[..., :HALF] | (nibbles[..., HALF:] << 4)
    return packed.reshape(rows, columns // 2).contiguous(), scale


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weights [N, K] that the bytes stand for, in float64."""
    rows, width = packed.shape
    groups = packed.reshape(rows, width // HALF, HALF)
    nibbles = torch.cat((groups & 0xF, groups >> 4), 2).double() - 8.0
    return (nibbles * scale.double()[..., None]).reshape(rows, 2 * width)


def check_width(columns: int) -> None:
    """Raises UnsupportedShape unless rows of so many weights are whole groups."""
    if columns % GROUP:
        raise UnsupportedShape(
            f"rows of {columns} weights are not whole groups of {GROUP} for the int4 kernels; "
            "serve these weights in bf16 or fp8: TENUTO_ENGINE_DTYPE = bf16"
        )


@triton.jit
def unpacked(nibble, kind: tl.constexpr):
    """Nibbles (uint8, 0 to 15) less 8 as kind, exactly, by bits: converting an integer is slow."""
    if kind == tl.bfloat16:
        values = (nibble.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0  # 128 + nibble
    elif kind == tl.float16:
        values = (nibble.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0  # 1024 + nibble
    else:
        values = (nibble.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2 ** 23 + nibble
    return values
