"""Tokens drawn where the logits are: only their ids come to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backends.face import Wish
from engine.kernels.draw import Rules, draw

_COLUMNS = 6  # of 8 bytes a row: temperature, top_p, log_min_p, seed, position, top_k


def draw_tokens(logits: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """int32 [rows] on the device of the logits, fp32 [rows, vocab]: a token for each wish, or -1."""
    out = torch.empty(len(wishes), dtype=torch.int32, device=logits.device)
    logits = _adjusted(logits, wishes)
    draw(logits, _rules(wishes, logits.device), out, allowed=_mask(wishes, logits))
    return out


def _adjusted(logits: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """As `engine.penalties.adjusted`, row by row: the same operations in the same order, each rounded to fp32."""
    if not any(wish.sampling.adjusts for wish in wishes):
        return logits
    out = logits.clone()
    for row, wish in zip(out, wishes, strict=True):
        rules = wish.sampling
        if rules.penalises and wish.tally is not None:
            ids = torch.from_numpy(wish.tally.ids).to(out.device)
            generated = torch.from_numpy(wish.tally.generated).to(out.device)
            x = row[ids]
            repetition = torch.tensor(rules.repetition_penalty, dtype=torch.float32, device=out.device)
            x = torch.where(x > 0, x / repetition, x * repetition)
            x = x - _fp32(rules.frequency_penalty) * generated
            row[ids] = x - _fp32(rules.presence_penalty) * (generated > 0)
        if rules.logit_bias:
            tokens, biases = zip(*rules.logit_bias, strict=True)
            ids = torch.tensor(tokens, device=out.device)
            row[ids] += torch.tensor(biases, dtype=torch.float32, device=out.device)
    return out


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _rules(wishes: Sequence[Wish], device: torch.device) -> Rules:
    table = np.zeros((_COLUMNS, len(wishes)), np.int64)
    reals = table.view(np.float64)
    for row, wish in enumerate(wishes):
        rules = wish.sampling
        reals[:2, row] = rules.temperature, rules.top_p
        reals[2, row] = math.log(rules.min_p) if rules.min_p > 0 else -math.inf
        table[3:, row] = _signed(rules.seed), wish.position, rules.top_k
    there = torch.from_numpy(table).to(device)
    real = there.view(torch.float64)
    return Rules(real[0], there[5].int(), real[1], there[3], there[4], real[2])


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
