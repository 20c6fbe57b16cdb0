"""Which drafts go into a step, and what became of them. On the compute thread; changes no token."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.draftmodel import DraftModel
from engine.drafts import NO_DRAFT, PRIORS, Draft, Record
from engine.facts import PAGE_SIZE
from engine.live import Live
from engine.sampling import Speculation
from engine.scheduler import Plan, Work
from engine.worth import MOST_ROWS, Worth

MOST_DRAFTS = 15  # of one request in a step
MOST_MODELLED = 6  # of those that a model makes, each of which is a step of it
_ENGINE_WEIGHT = 200.0
Found = tuple[Draft, list[float]]  # and how likely each token of it is to stand, those before it included


@dataclass
class Speculated:
    """Since the engine started. A pass is one verification of one request.

    tokens: that passes brought, the one after the drafts that stood included
    draft_s, verify_s: seconds that drafts took to find, and steps that verified
    saved_s: seconds by which these steps were shorter than steps without drafts for as many tokens, as far as they are
    known; below zero where they were longer
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    saved_s: float = 0.0

    def as_message(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "accepted_share": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "tokens_per_pass": round(self.tokens / self.passes, 4) if self.passes else None,
        }


class Speculator:
    """`always` (for tests): verify whatever drafts there are. `model` drafts where nothing better is at hand."""

    def __init__(self, *, enabled: bool = True, always: bool = False, model: DraftModel | None = None) -> None:
        self.enabled, self.always = enabled, always
        self._model = model
        self.totals = Speculated()
        self._worth = Worth()
        self._records = {kind: Record(share) for kind, share in PRIORS.items()}

    def propose(self, plan: Plan, lives: Mapping[str, Live], spare_pages: int) -> list[Draft]:
        """A draft for each piece of the plan's work, mostly an empty one. Only steps that do nothing but decode verify:
        where a prompt is being read, the step is full."""
        nothing = [NO_DRAFT] * len(plan.work)
        if not self.enabled or plan.prefill:
            return nothing
        asked = [lives[work.request.spec.request_id] for work in plan.work]
        found = self._modelled(asked, [self._found(live) for live in asked], set(lives))
        chances = sorted(
            ((chance, at) for at, (_, own) in enumerate(found) for chance in own),
            reverse=True,
        )
        count = len(chances) if self.always else self._worth.choose(len(plan.work), [one for one, _ in chances])
        drafts = list(nothing)
        for at, (draft, _) in enumerate(found):
            drafts[at] = draft.cut(sum(1 for _, owner in chances[:count] if owner == at))
        return _within(drafts, plan.work, spare_pages)

    def observe(self, plan: Plan, drafts: int, step_s: float, draft_s: float) -> None:
        """A step has ended; `drafts` of its rows were drafts."""
        if plan.prefill:
            return
        self._worth.observe(len(plan.work), drafts, step_s)
        if drafts:
            self.totals.steps += 1
            self.totals.verify_s += step_s
            self.totals.draft_s += draft_s
            self.totals.saved_s -= step_s + draft_s

    def verified(self, live: Live, draft: Draft, accepted: int, requests: int) -> None:
        """So many of the drafts stood in a step of `requests`."""
        totals, own = self.totals, live.drafting
        for counted in (totals, own):
            counted.passes += 1
            counted.drafted += len(draft.tokens)
            counted.accepted += accepted
        totals.tokens += accepted + 1
        totals.saved_s += (accepted + 1) * self._worth.base_s(requests) / requests
        for index, kind in enumerate(draft.kinds[: accepted + 1]):
            self._learn(live, kind, index < accepted)

    def told(self, live: Live, token: int) -> None:
        """A token was drawn without a draft: what would have been drafted is learnt from all the same."""
        if live.drafting.unverified is not None:
            kind, expected = live.drafting.unverified
            live.drafting.unverified = None
            self._learn(live, kind, token == expected)

    def _learn(self, live: Live, kind: str, stood: bool) -> None:
        live.drafting.record(kind, self._records[kind].share).saw(stood)
        self._records[kind].saw(stood, _ENGINE_WEIGHT)

    def _found(self, live: Live) -> Found:
        """The best draft of a generation, and how likely each token of it is to stand."""
        request = live.request
        most = min(MOST_DRAFTS, request.limit - len(request.tokens) - 1)
        if request.spec.speculation is Speculation.OFF or most < 1:
            return NO_DRAFT, []
        draft = self._draft(live, most)
        if not draft.tokens:
            live.drafting.unverified = None
            return NO_DRAFT, []
        live.drafting.unverified = (draft.kinds[0], draft.tokens[0])
        return draft, self._chances(live, draft.kinds)

    def _chances(self, live: Live, kinds: Sequence[str]) -> list[float]:
        """How likely each token of a draft is to stand, those before it included."""
        shares = (live.drafting.record(kind, self._records[kind].share).share for kind in kinds)
        return list(itertools.accumulate(shares, operator.mul))

    def _modelled(self, asked: list[Live], found: list[Found], running: set[str]) -> list[Found]:
        """With drafts of the model for those who have none, or one that is less likely to stand."""
        model = self._model
        if model is None:
            return found
        model.keep(running)
        likely = []
        for live, (_, others) in zip(asked, found, strict=True):
            most = min(MOST_MODELLED, live.request.limit - len(live.request.tokens) - 1)
            own = self._chances(live, ["model"] * max(0, most))
            better = own and own[0] > (others[0] if others else 0.0)
            likely.append(own if better and live.request.spec.speculation is not Speculation.OFF else [])
        chances = sorted((chance for own in likely for chance in own), reverse=True)
        count = len(chances) if self.always else self._worth.choose(len(asked), chances, model.step_s)
        least = chances[count - 1] if count else 2.0
        wanted = [(live, sum(chance >= least for chance in own)) for live, own in zip(asked, likely, strict=True)]
        for at, draft in enumerate(model.propose(wanted)):
            if draft.tokens:
                kept = self._allowed(asked[at], draft)
                found[at] = kept, likely[at][: len(kept.tokens)]
        return found

    def _allowed(self, live: Live, draft: Draft) -> Draft:
        """What the grammar admits of it. By the ratio rule that is seen at the verification: a draft that is left out
        for what it is would leave its mark on what is drawn instead."""
        if live.constraint is None or live.request.spec.speculation is Speculation.RATIO:
            return draft
        return draft.cut(live.constraint.valid(draft.tokens))

    def _draft(self, live: Live, most: int) -> Draft:
        if live.constraint is not None and (forced := live.constraint.forced()):
            return Draft(tuple(forced[:most]), ("grammar",) * min(most, len(forced)))
        live.drafting.lookup.follow(live.request.tokens)
        draft = live.drafting.lookup.propose(most)
        return draft.cut(live.constraint.valid(draft.tokens)) if live.constraint is not None else draft


def _within(drafts: list[Draft], works: tuple[Work, ...], spare_pages: int) -> list[Draft]:
    """Drafts that fit into the pages that nobody else is owed, and into a step."""
    room, rows, kept = spare_pages, MOST_ROWS, []
    for draft, work in zip(drafts, works, strict=True):
        held = max(len(work.request.blocks), -(-len(work.request.tokens) // PAGE_SIZE)) * PAGE_SIZE
        end = work.start + work.count
        fits = min(len(draft.tokens), held + room * PAGE_SIZE - end, rows)
        cut = draft.cut(max(0, fits))
        room -= max(0, -(-(end + len(cut.tokens) - held) // PAGE_SIZE))
        rows -= len(cut.tokens)
        kept.append(cut)
    return kept
