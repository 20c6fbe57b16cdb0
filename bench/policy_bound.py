"""How much of the oracle's gain there is for whoever does not know when a tool will end.

A relaxation: the KV of a pause is held by the piece, each until a moment that is fixed when the pause begins and is
best for the tool's true distribution under a price of memory; only the mean of each span of time has to fit, sessions
that wait or run weigh nothing, and what was held is there at once. Pauses are independent and a pause tells nothing but
that it lasts, so for given prices the best rule for a piece is a time to live; and at prices that just use the memory
up, no rule without foresight saves more recomputing in expectation (weak duality: every rule that fits the memory fits
its mean). That is proven of work, not of waiting. What is reported is the first-token time that this work leaves, in
our order of service, with prices found by iteration to a few per cent of the memory; a rule could in principle save
less work at better moments. With `foresight` the same for one that knows the returns, which says how loose it is.

On the seeds held out, people answering and a live set of 3.7 times the tiers: the relaxation keeps 93.3 % of the
oracle's gain, the rule with the true distributions 92.1 %, ours 92.0 %. As far as the work that is left decides, 95 %
is not to be had there without knowing when people answer, and learning costs next to nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bench import policy_rivals as rivals
from bench.policy_load import CONTEXT_TOKENS, MIXES
from bench.policy_machine import Hardware
from bench.policy_run import BOUND, BOUND_WITH_FORESIGHT, OURS, Found, Length, population, prepared
from bench.policy_sim import Simulation
from kvtier.policy import Move, Place, Policy, Reason, SessionView
from kvtier.policy.keep import PAUSES
from kvtier.policy.survival import EDGES, Array

PIECES = 64
STEP = CONTEXT_TOKENS / PIECES
POSITIONS = (np.arange(PIECES) + 0.5) * STEP
SPANS = 8
ROUNDS = 32
SETTLED = 8
"""The last rounds, whose mean is reported: a run's mean wait jumps with who meets whom."""


class Fluid(Simulation):
    """`lost`: the sessions found in a pause whose KV is gone already. `prices`: seconds per token and second."""

    def __init__(
        self,
        hardware: Hardware,
        mix: str,
        prices: Array,
        ends_s: float,
        lost: set[str],
        foresight: bool,
        length: Length,
    ) -> None:
        super().__init__(hardware, Policy(rivals.Lru()), rivals.least_left, length.warm, length.measure)
        self.known = rivals.Informed(MIXES[mix])
        self.spans = np.linspace(0.0, ends_s, SPANS + 1)
        self.prices = prices
        self.lost = lost
        self.foresight = foresight
        self.held = np.zeros(SPANS)
        self.marginal = hardware.prefill.linear_s + 2 * hardware.prefill.square_s * POSITIONS
        self._until: dict[tuple[str, int], Array] = {}
        self._alive: dict[tuple[str, float | None], Array] = {}

    def mean_tokens(self) -> Array:
        """Held in each span, when the run is over."""
        for name, session in self.sessions.items():
            if session.state in PAUSES and session.tokens:
                self._book(name, session)
        return self.held / np.diff(self.spans)

    def _come(self, name: str, returned: bool) -> None:
        session = self.sessions[name]
        if returned:
            kept = self._book(name, session) >= self.now_s
            cut = min(int(np.argmax(kept) * STEP), session.tokens) if kept.any() else session.tokens
            self._become(name, resident=False, copy=Place.HOST, copy_from=cut, copy_to=session.tokens)
        super()._come(name, returned)

    def _book(self, name: str, session: SessionView) -> Array:
        """[PIECES]: until when each piece was held; the memory is put down."""
        begin_s = max(session.since_s, 0.0)
        until = self._held_until(name, session, begin_s)
        here = (session.tokens - POSITIONS + STEP / 2).clip(0, STEP)
        stop = np.minimum(until, self.now_s)[:, None]
        inside = np.minimum(stop, self.spans[1:]) - np.maximum(begin_s, self.spans[:-1])
        self.held += (inside.clip(0, None) * here[:, None]).sum(0)
        return until

    def _held_until(self, name: str, session: SessionView, begin_s: float) -> Array:
        if name in self.lost and session.since_s <= 0:
            return np.full(PIECES, -1.0)
        if self.foresight:
            end_s = self.ends_s[name, session.turn]
            cost = self._paid(np.array([begin_s, end_s]))
            return np.where(self.marginal >= cost[1] - cost[0], end_s, begin_s)
        edges = np.maximum(EDGES, begin_s - session.since_s)
        alive = self._survival(session)
        paid = np.diff(self._paid(session.since_s + edges))
        cost = np.concatenate([[0.0], np.cumsum((alive[:-1] + alive[1:]) / 2 * paid)])
        gone = np.interp(edges[0], EDGES, alive) - alive
        worth = np.where(edges[0] <= EDGES, self.marginal[:, None] * gone - cost, 0.0)
        until: Array = session.since_s + edges[np.argmax(worth, axis=1)]
        return until

    def _survival(self, session: SessionView) -> Array:
        key = (session.tool, session.timeout_s)
        if key not in self._alive:
            self._alive[key] = self.known.distribution(session.tool).capped(session.timeout_s).at
        return self._alive[key]

    def _paid(self, moments_s: Array) -> Array:
        """The integral of the price from 0; the last price goes on for ever."""
        spent = np.concatenate([[0.0], np.cumsum(self.prices * np.diff(self.spans))])
        beyond = (moments_s - self.spans[-1]).clip(0, None) * self.prices[-1]
        total: Array = np.interp(moments_s, self.spans, spent) + beyond
        return total

    def _admit(self, name: str) -> bool:
        slot, session = self.slots[name], self.sessions[name]
        slot.ready_s = self.now_s
        slot.head, slot.tail = session.copy_from, session.tokens
        self._become(name, held=True)
        return True

    def _ask(self, reason: Reason, name: str, need_bytes: int = 0) -> list[Move]:
        return []

    def _close(self, name: str) -> None:
        self._become(name, copy=None)
        super()._close(name)


def bound(mix: str, ratio: float, seed: int, length: Length, demand: float, foresight: bool = False) -> dict[str, Any]:
    """A line as `policy_run.simulate` gives it, of the relaxation on the same machine under the same load."""
    model, times = prepared(OURS, mix, ratio, seed, length, demand)
    lost = {name for name, session in model.sessions.items() if not session.resident and session.copy is None}
    room = sum(tier.capacity_bytes for tier in model.tiers.values()) / model.hardware.bytes_per_token
    model.run()
    everything = model.hardware.sized(1 << 62, 0)
    found = population(seed, mix)
    prices = np.full(SPANS, everything.prefill.linear_s / model.now_s)
    waited = []
    for _ in range(ROUNDS):
        fluid = Fluid(everything, mix, prices, model.now_s, lost, foresight, length)
        pairs = [_twice(one) for one in found]
        found = [once for once, _ in pairs]
        for _, (turns, index, left, following) in pairs:
            fluid.begin_paused(turns, index, left, following)
        outcome = fluid.run()
        waited.append(outcome.waited_s / outcome.firsts)
        prices = prices * (fluid.mean_tokens() / room).clip(0.3, 3) ** 0.5
    name = BOUND_WITH_FORESIGHT if foresight else BOUND
    where = {"policy": name, "mix": mix, "ratio": ratio, "seed": seed, "demand": demand, "speed": round(times, 3)}
    return {**where, "waited_s": float(np.mean(waited[-SETTLED:])) * length.measure, "firsts": length.measure}


def _twice(one: Found) -> tuple[Found, Found]:
    """The same session, to be played twice."""
    turns, index, left, following = one
    once, again = itertools.tee(following)
    return (turns, index, left, once), (turns, index, left, again)
