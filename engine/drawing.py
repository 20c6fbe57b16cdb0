"""From rows of logits to tokens: on the host, or as a device has drawn them already."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from engine.backends.face import Backend, DrawsTokens, Logits, Tile, Wish
from engine.drafts import Draft
from engine.errors import EngineFault
from engine.live import Live
from engine.sampler import NOTHING_POSSIBLE, Ids, Reals, distribution, sample, uniform
from engine.sampling import Sampling, Speculation

_RATIO = 0x5EED_0F_1A_7E_D4AF  # apart from the noise that `sample` draws with
_ANY = Wish(Sampling(), 0)  # of a row that is not drawn from


class Answer(Protocol):
    """What a step says of one request: a row of logits for the token after its last one, then one for each draft."""

    def drawn(self, index: int, wish: Wish) -> int:
        """The token of a row. Raises EngineFault where none is possible."""
        ...

    def logits(self, index: int) -> Logits: ...


class HostAnswer:
    """Logits on the host."""

    def __init__(self, rows: Sequence[Logits]) -> None:
        self._rows = rows

    def drawn(self, index: int, wish: Wish) -> int:
        return sample(self._rows[index], wish.sampling, wish.position, wish.allowed, wish.tally)

    def logits(self, index: int) -> Logits:
        return self._rows[index]


class DeviceAnswer:
    """Tokens that were drawn on the device; logits of those who need them."""

    def __init__(self, tokens: Sequence[int], rows: Sequence[Logits]) -> None:
        self._tokens, self._rows = tokens, rows

    def drawn(self, index: int, wish: Wish) -> int:
        if self._tokens[index] < 0:
            raise EngineFault(NOTHING_POSSIBLE)
        return self._tokens[index]

    def logits(self, index: int) -> Logits:
        return self._rows[index]


def answers(backend: Backend, tiles: list[Tile], asked: Sequence[tuple[Live, Draft]]) -> list[Answer]:
    """Run a step."""
    if isinstance(backend, DrawsTokens):
        return _on_device(backend, tiles, asked)
    given = [rows for rows in backend.forward(tiles) if rows is not None]
    flat: list[Logits] = [row for rows in given for row in (rows if rows.ndim == 2 else [rows])]
    cuts = np.cumsum([0, *(len(draft.tokens) + 1 for _, draft in asked)]).tolist()
    return [HostAnswer(flat[start:end]) for start, end in itertools.pairwise(cuts)]


def _on_device(backend: DrawsTokens, tiles: list[Tile], asked: Sequence[tuple[Live, Draft]]) -> list[Answer]:
    wishes = [_along(live, draft) for live, draft in asked]
    tokens = backend.draw(tiles, [wish for some in wishes for wish in some])
    needs = [live.wants_logits for live, _ in asked]
    wanted: list[int] = []
    at = 0
    for some, needed in zip(wishes, needs, strict=True):
        wanted += range(at, at + len(some)) if needed else ()
        at += len(some)
    rows = iter(backend.rows(wanted) if wanted else [])
    given: list[Answer] = []
    at = 0
    for some, needed in zip(wishes, needs, strict=True):
        own = [next(rows) for _ in some] if needed else []
        given.append(DeviceAnswer(tokens[at : at + len(some)], own))
        at += len(some)
    return given


def wish_of(live: Live) -> Wish | None:
    """What is to be drawn next; None where the grammar is at its end."""
    allowed = live.constraint.allowed() if live.constraint is not None else None
    if live.constraint is not None and allowed is None:
        return None
    tally = live.seen.tally() if live.seen is not None else None
    return Wish(live.request.spec.sampling, len(live.request.tokens), allowed, tally)


def _along(live: Live, draft: Draft) -> list[Wish]:
    """What is to be drawn at each position, if the drafts before it stand."""
    wishes: list[Wish] = []
    taken: list[int] = []
    for token in (*draft.tokens, None):
        wish = wish_of(live)
        if wish is None:
            break
        wishes.append(replace(wish, position=wish.position + len(taken)))
        if token is None or (live.constraint is not None and not live.constraint.accept(token)):
            break
        if live.seen is not None:
            live.seen.push(token)
        taken.append(token)
    if live.constraint is not None:
        live.constraint.back(len(taken))
    if live.seen is not None:
        for token in reversed(taken):
            live.seen.pop(token)
    return wishes + [_ANY] * (len(draft.tokens) + 1 - len(wishes))


def token_of(live: Live, answer: Answer, index: int, draft: Draft) -> int | None:
    """The next token of a generation, from the row after `index` drafts that stand; None: its grammar is at its end.
    Raises EngineFault where no token is possible."""
    wish = wish_of(live)
    if wish is None:
        return None
    if index < len(draft.tokens) and live.request.spec.speculation is Speculation.RATIO:
        return by_ratio(answer.logits(index), wish, draft, index)
    return answer.drawn(index, wish)


def by_ratio(logits: Logits, wish: Wish, draft: Draft, index: int) -> int:
    """A draft stands with probability min(1, p / q), else a draw from max(p - q, 0) takes its place (Leviathan, Kalman
    and Matias 2023, A.1; the source of a draft that is certain of it has q = 1)."""
    ids, p = distribution(logits, wish.sampling, wish.allowed, wish.tally)
    token = draft.tokens[index]
    certain = (np.array([token]), np.ones(1))
    q_ids, q = draft.drawn_from[index] if draft.drawn_from else certain
    stands, rest = uniform(wish.sampling.seed ^ _RATIO, wish.position, np.arange(2))
    if stands * _share(q_ids, q, token) < _share(ids, p, token):
        return token
    excess = np.maximum(p - np.array([_share(q_ids, q, int(one)) for one in ids]), 0.0)
    sums = np.cumsum(excess if excess.any() else p)
    return int(ids[min(int(np.searchsorted(sums, rest * sums[-1], side="right")), len(ids) - 1)])


def _share(ids: Ids, shares: Reals, token: int) -> float:
    at = int(np.searchsorted(ids, token))
    return float(shares[at]) if at < len(ids) and ids[at] == token else 0.0
