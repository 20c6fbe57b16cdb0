"""Tokens drawn where the logits are: only their ids come to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backends.face import Wish
from engine.kernels.draw import Rules, draw

_COLUMNS = 5  # of 8 bytes a row: temperature, top_p, seed, position, top_k


def draw_tokens(logits: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """int32 [rows] on the device of the logits, fp32 [rows, vocab]: a token for each wish, or -1."""
    out = torch.empty(len(wishes), dtype=torch.int32, device=logits.device)
    draw(logits, _rules(wishes, logits.device), out, allowed=_mask(wishes, logits))
    return out


def _rules(wishes: Sequence[Wish], device: torch.device) -> Rules:
    table = np.zeros((_COLUMNS, len(wishes)), np.int64)
    reals = table.view(np.float64)
    for row, wish in enumerate(wishes):
        rules = wish.sampling
        reals[0, row], reals[1, row] = rules.temperature, rules.top_p
        table[2:, row] = _signed(rules.seed), wish.position, rules.top_k
    there = torch.from_numpy(table).to(device)
    real = there.view(torch.float64)
    return Rules(real[0], there[4].int(), real[1], there[2], there[3])


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    bits = seed & (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def _mask(wishes: Sequence[Wish], logits: Tensor) -> Tensor | None:
    if all(wish.allowed is None for wish in wishes):
        return None
    mask = np.ones(logits.shape, np.bool_)
    for row, wish in enumerate(wishes):
        if wish.allowed is not None:
            mask[row] = wish.allowed
    return torch.from_numpy(mask).to(logits.device)
