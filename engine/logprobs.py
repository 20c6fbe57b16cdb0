"""How likely a token was, as the model has it: the logits before any option is applied to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.backends.face import Logits
from engine.sampling import Logprob

LEAST = -9999.0  # of what has no finite logit: JSON has no infinity


def logprob_of(logits: Logits, token: int, top: int) -> Logprob:
    """Of fp32 logits [vocab], in float64."""
    finite = np.isfinite(logits)
    wide = np.where(finite, logits, -np.inf).astype(np.float64)
    peak = float(wide.max())
    total = peak + float(np.log(np.exp(wide - peak).sum()))

    def told(one: int) -> float:
        return max(LEAST, float(wide[one]) - total)

    return Logprob(told(token), tuple((int(one), told(int(one))) for one in _likeliest(wide, top)))


def _likeliest(wide: np.ndarray[Any, np.dtype[np.float64]], top: int) -> list[int]:
    if top <= 0:
        return []
    edge = np.partition(wide, len(wide) - top)[len(wide) - top] if top < len(wide) else -np.inf
    ids = np.flatnonzero(wide >= edge)
    return [int(one) for one in ids[np.lexsort((ids, -wide[ids]))][:top]]
