"""A smaller model that drafts. It shares the tokenizer and, by shared noise, the noise of the larger one; its pages are
its own, are never looked for and never kept, and go when the generation ends. On the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.backends.face import Backend, Logits, Tile, cut
from engine.drafts import NO_DRAFT, Draft
from engine.facts import PAGE_SIZE
from engine.live import Live
from engine.penalties import Ids
from engine.sampler import Reals, distribution, sample, uniform
from engine.sampling import Sampling, Speculation

CATCH_UP = 256  # tokens of a transcript that it reads before a step, at most; it drafts once it has caught up
_OWN = 0x0D_4A_F7_D4_A3  # apart from the noise of the larger model, for the ratio rule
_NEW = 0.1


@dataclass
class _Known:
    """What it has of one generation: tokens whose KV lies in `blocks`."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0  # of them, known to be the transcript's
    blocks: list[int] = field(default_factory=list)


class DraftModel:
    """`blocks`: pages of its backend; `context`: tokens that it can have seen. `step_s`: what one more token of a draft
    takes, as seen lately."""

    def __init__(
        self, backend: Backend, blocks: int, context: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._backend, self._context, self._clock = backend, context, clock
        self._free = list(range(blocks))
        self._known: dict[str, _Known] = {}
        self.step_s = 0.0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def keep(self, running: set[str]) -> None:
        """Give back the pages of whatever does not run any more."""
        for name in [name for name in self._known if name not in running]:
            self._free += self._known.pop(name).blocks

    def propose(self, asked: Sequence[tuple[Live, int]]) -> list[Draft]:
        """Up to so many tokens for each; nothing for those whose transcript it has not read yet, or has no room for."""
        drafts: dict[int, tuple[list[int], list[tuple[Ids, Reals]]]] = {}
        rows = self._caught_up(asked)
        while rows:
            more: list[tuple[int, list[Tile]]] = []
            for at, logits in rows.items():
                live, most = asked[at]
                tokens, drawn_from = drafts.setdefault(at, ([], []))
                token = _drawn(live, logits, len(tokens), drawn_from)
                tokens.append(token)
                known = self._known[live.request.spec.request_id]
                if len(tokens) < most and self._room(known, len(known.tokens) + 1):
                    more.append((at, cut(known.blocks, len(known.tokens), [token])))
                    known.tokens.append(token)
            rows = self._run(more)
        return [
            Draft(tuple(drafts[at][0]), ("model",) * len(drafts[at][0]), tuple(drafts[at][1]))
            if at in drafts
            else NO_DRAFT
            for at in range(len(asked))
        ]

    def _caught_up(self, asked: Sequence[tuple[Live, int]]) -> dict[int, Logits]:
        """Logits after the transcript, of those who have been read to their end."""
        ran: list[tuple[int, list[Tile]]] = []
        for at, (live, most) in enumerate(asked):
            tokens = live.request.tokens
            known = self._known.setdefault(live.request.spec.request_id, _Known())
            start = _agreed(known, tokens)
            end = min(len(tokens), start + CATCH_UP)
            del known.tokens[start:]
            if most < 1 or not self._room(known, end):
                continue
            known.tokens += tokens[start:end]
            known.agreed = end
            ran.append((at, cut(known.blocks, start, tokens[start:end], end == len(tokens))))
        return self._run(ran)

    def _run(self, ran: Sequence[tuple[int, list[Tile]]]) -> dict[int, Logits]:
        if not ran:
            return {}
        started_s = self._clock()
        tiles = [tile for _, some in ran for tile in some]
        given = dict(zip((id(tile) for tile in tiles), self._backend.forward(tiles), strict=True))
        if all(len(some) == 1 and len(some[0].tokens) == 1 for _, some in ran):
            took_s = self._clock() - started_s
            self.step_s += _NEW * (took_s - self.step_s) if self.step_s else took_s
        last = {at: given[id(some[-1])] for at, some in ran}
        return {at: logits.copy() for at, logits in last.items() if logits is not None}

    def _room(self, known: _Known, end: int) -> bool:
        """Whether there are pages for tokens up to `end`; takes them."""
        needed = -(-end // PAGE_SIZE) - len(known.blocks)
        if needed > len(self._free) or end > self._context:
            return False
        for _ in range(needed):
            block = self._free.pop()
            self._backend.zero(block)
            known.blocks.append(block)
        return True


def _agreed(known: _Known, tokens: Sequence[int]) -> int:
    """How many of its tokens are the transcript's; its last one is run again, for the logits after it."""
    at = known.agreed
    while at < min(len(known.tokens), len(tokens)) and known.tokens[at] == tokens[at]:
        at += 1
    known.agreed = min(at, len(tokens) - 1)
    return known.agreed


def _drawn(live: Live, logits: Logits, ahead: int, drawn_from: list[tuple[Ids, Reals]]) -> int:
    """By shared noise the token that the larger model would draw from these logits; by the ratio rule a draw of its
    own, from what `drawn_from` is told of."""
    sampling, position = live.request.spec.sampling, len(live.request.tokens) + ahead
    if live.request.spec.speculation is not Speculation.RATIO:
        return sample(logits, _plain(sampling), position)
    ids, shares = distribution(logits, _plain(sampling))
    drawn_from.append((ids, shares))
    (u,) = uniform(sampling.seed ^ _OWN, position, np.zeros(1, np.int64))
    return int(ids[min(int(np.searchsorted(np.cumsum(shares), u, side="right")), len(ids) - 1)])


def _plain(sampling: Sampling) -> Sampling:
    """Without what depends on tokens that may not stand: a draft may be worse for it, and never wrong."""
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, min_p=sampling.min_p)
