"""Where drafts come from: what the grammar forces, and what the transcript has said before (Saxena 2023).

An agent repeats what its tools printed, and a tool call is half punctuation. Neither source costs a model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.penalties import Ids
from engine.sampler import Reals

LONGEST_MATCH = 16
_FIRST_ROOM = 1024
_FIRST_WEIGHT, _MOST_WEIGHT = 4.0, 24.0  # of what was known before, in tokens seen


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next. `kinds` names how each was found: those of one kind stand about as often, if those
    before them do.

    `drawn_from`: ids and probabilities that each was drawn from; empty where drafts are certain of themselves
    """

    tokens: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    drawn_from: tuple[tuple[Ids, Reals], ...] = ()

    def cut(self, count: int) -> Draft:
        return Draft(self.tokens[:count], self.kinds[:count], self.drawn_from[:count])


NO_DRAFT = Draft()


# By how much of the transcript's end they match, and how likely the next token is to stand before anything is known; by
# how many of several matches go on alike.
_MATCHES = {10: 0.85, 5: 0.7, 3: 0.5, 2: 0.3, 1: 0.1}
_AGREED = ("once", "few", "most", "all")
PRIORS = {
    "grammar": 0.9,
    **{f"lookup-{least}-{agreed}": share for least, share in _MATCHES.items() for agreed in _AGREED},
    "model": 0.6,
}


def _kind(matched: int, agreed: str) -> str:
    return f"lookup-{next(least for least in _MATCHES if matched >= least)}-{agreed}"


def _agreed(alike: int, of: int) -> str:
    """How many of so many matches go on as the latest one does."""
    return "once" if of == 1 else "all" if alike == of else "most" if 2 * alike > of else "few"


class PromptLookup:
    """Continues the transcript as it went on the last time that it said the same."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_ROOM, np.int32)
        self._count = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """What was added since the last time; what was there stays as it was."""
        if len(tokens) > len(self._ids):
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)

    def propose(self, most: int) -> Draft:
        """Up to `most` tokens after the longest match of the transcript's end; the latest one of several."""
        count, ids = self._count, self._ids[: self._count]
        if count < 2 or most < 1:
            return NO_DRAFT
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # of the matches
        matched = 1
        while len(ends) and matched < LONGEST_MATCH:
            far = ends[ends >= matched]
            longer = far[ids[far - matched] == ids[-1 - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if not len(ends):
            return NO_DRAFT
        at = int(ends[-1])
        after = ids[at + 1 : at + 1 + most].tolist()
        while len(after) < most:  # it repeats itself: the draft goes on as it began
            after += after[: most - len(after)]
        agreed = _agreed(int(np.count_nonzero(ids[ends + 1] == ids[at + 1])), len(ends))
        return Draft(tuple(after), tuple(_kind(matched + more, agreed) for more in range(most)))


@dataclass
class Record:
    """How drafts of one kind fared: a mean that forgets."""

    share: float
    weight: float = _FIRST_WEIGHT

    def saw(self, stood: bool, most_weight: float = _MOST_WEIGHT) -> None:
        self.share += (stood - self.share) / (self.weight + 1)
        self.weight = min(self.weight + 1, most_weight)


@dataclass
class Drafting:
    """The drafts of one generation: `drafted` were verified in `passes`, `accepted` of them stood. `unverified`: kind
    and first token of a draft that may be left out of the step.
    """

    lookup: PromptLookup = field(default_factory=PromptLookup)
    records: dict[str, Record] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    unverified: tuple[str, int] | None = None

    def record(self, kind: str, prior: float) -> Record:
        """`prior`: how such drafts fared with others."""
        return self.records.setdefault(kind, Record(prior))
