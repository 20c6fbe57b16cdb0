"""Which drafts go into a step, and what became of them. On the compute thread; changes no token."""

from __future__ import annotations

from collections.abc import Mapping
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
Found = tuple[Draft, float]  # and how likely each token of it is to stand


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
            ((share ** (n + 1), at) for at, (draft, share) in enumerate(found) for n in range(len(draft.tokens))),
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
        for stood in [True] * accepted + [False] * (accepted < len(draft.tokens)):
            self._learn(live, draft.kind, stood)

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
            return NO_DRAFT, 0.0
        draft = self._draft(live, most)
        if not draft.tokens:
            live.drafting.unverified = None
            return NO_DRAFT, 0.0
        live.drafting.unverified = (draft.kind, draft.tokens[0])
        return draft, live.drafting.record(draft.kind, self._records[draft.kind].share).share

    def _modelled(self, asked: list[Live], found: list[Found], running: set[str]) -> list[Found]:
        """With drafts of the model for those who have none, or one that is less likely to stand."""
        model = self._model
        if model is None:
            return found
        model.keep(running)
        shares = [live.drafting.record("model", self._records["model"].share).share for live in asked]
        mosts = [
            min(MOST_MODELLED, live.request.limit - len(live.request.tokens) - 1)
            if live.request.spec.speculation is not Speculation.OFF and shares[at] > found[at][1]
            else 0
            for at, live in enumerate(asked)
        ]
        chances = sorted((shares[at] ** (n + 1) for at, most in enumerate(mosts) for n in range(most)), reverse=True)
        count = len(chances) if self.always else self._worth.choose(len(asked), chances, model.step_s)
        least = chances[count - 1] if count else 2.0
        wanted = [sum(shares[at] ** (n + 1) >= least for n in range(most)) for at, most in enumerate(mosts)]
        drafts = model.propose([(live, most) for live, most in zip(asked, wanted, strict=True)])
        for at, draft in enumerate(drafts):
            if draft.tokens:
                found[at] = self._allowed(asked[at], draft), shares[at]
        return found

    def _allowed(self, live: Live, draft: Draft) -> Draft:
        """What the grammar admits of it. By the ratio rule that is seen at the verification: a draft that is left out
        for what it is would leave its mark on what is drawn instead."""
        if live.constraint is None or live.request.spec.speculation is Speculation.RATIO:
            return draft
        return draft.cut(live.constraint.valid(draft.tokens))

    def _draft(self, live: Live, most: int) -> Draft:
        if live.constraint is not None and (forced := live.constraint.forced()):
            return Draft(tuple(forced[:most]), "grammar")
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
