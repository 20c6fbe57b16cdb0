"""What the tokens so far do to the logits of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.sampling import Sampling

Ids = np.ndarray[Any, np.dtype[np.int64]]
Reals = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Tally:
    """Tokens whose logits are changed, each once. `generated`: how often each was generated, fp32."""

    ids: Ids
    generated: Reals


class Seen:
    """Counts the tokens of a transcript of which the last `generated` were generated. Steps back as it steps on."""

    def __init__(self, tokens: Sequence[int], generated: int) -> None:
        prompt = len(tokens) - generated
        self._slot: dict[int, int] = {}
        for token in tokens:
            self._slot.setdefault(token, len(self._slot))
        room = 2 * len(self._slot) + 64
        self._ids, self._present, self._generated = (np.zeros(room, np.int64) for _ in range(3))
        self._ids[: len(self._slot)] = list(self._slot)
        for token in tokens[:prompt]:
            self._present[self._slot[token]] += 1
        for token in tokens[prompt:]:
            self.push(token)

    def push(self, token: int) -> None:
        """One more was generated."""
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids, self._present, self._generated = (
                np.concatenate([old, np.zeros_like(old)]) for old in (self._ids, self._present, self._generated)
            )
        self._ids[slot] = token
        self._present[slot] += 1
        self._generated[slot] += 1

    def pop(self, token: int) -> None:
        """The last one was not."""
        slot = self._slot[token]
        self._present[slot] -= 1
        self._generated[slot] -= 1

    def tally(self) -> Tally:
        there = np.flatnonzero(self._present[: len(self._slot)])
        return Tally(self._ids[there], self._generated[there].astype(np.float32))


def adjusted(logits: Reals, sampling: Sampling, tally: Tally | None) -> Reals:
    """The logits [vocab] that are drawn from, in fp32 and in one order of operations, so that a device that does the
    same has the same bits."""
    if not sampling.adjusts:
        return logits
    out = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if sampling.penalises and tally is not None:
            out[tally.ids] = _penalised(out[tally.ids], sampling, tally.generated)
        for token, bias in sampling.logit_bias:
            out[token] += np.float32(bias)
    return out


def _penalised(x: Reals, sampling: Sampling, generated: Reals) -> Reals:
    repetition = np.float32(sampling.repetition_penalty)
    penalised: Reals = np.where(x > 0, x / repetition, x * repetition)
    penalised -= np.float32(sampling.frequency_penalty) * generated
    penalised -= np.float32(sampling.presence_penalty) * (generated > 0)
    return penalised
