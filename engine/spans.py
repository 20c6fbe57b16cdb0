"""What the engine's time goes into: every step, and every long wait of a generation, with what it was made of.

Sums grow from step to step; a generation remembers them as they were at its latest token, and the difference at its
next one says what happened in between. So a usual token costs next to nothing, and only a long wait is written down.

    token                                                                                next token
      |-- host --|--- step ---|-- host --|-------- step --------|   or:  |-- queue --|-- restore --|-- step --|
                  usual | +prefill          usual | +graph miss           (sent back)    (its tiers)

Everything is in rings: the doctor asks about now. Runs on the compute thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

STEPS: Final = 512
WAITS: Final = 128
INTERVALS: Final = 2048
LONG: Final = 4.0  # times the usual interval: a wait that somebody sees
LONG_S: Final = 0.05  # nobody sees a shorter one
LONG_FIRST: Final = 3.0  # times its own computing, before the first token
LONG_FIRST_S: Final = 0.5
_FIRST: Final = 8  # values of a kind that tell little of what is usual


class Sums(NamedTuple):
    """Seconds since the start, beyond what is usual but for `model_s`.

    model_s:   all steps
    prefill_s: steps that carried prefill, and admissions, beyond a step that only decodes
    missed_s:  decode steps that found no recorded graph
    slow_s:    decode steps that took longer for no reason that is known here
    host_s:    between two steps while work waited: sampling, commands, whatever else had the processor
    swap_s:    requests that were sent back, and dirty pages that had to be copied out for a step to have room
    copy_s:    snapshots of pages for the tiers
    """

    model_s: float = 0.0
    prefill_s: float = 0.0
    missed_s: float = 0.0
    slow_s: float = 0.0
    host_s: float = 0.0
    swap_s: float = 0.0
    copy_s: float = 0.0


_NOTHING: Final = Sums()


class Step(NamedTuple):
    """A step of the model. `host_s`: since the one before, while work waited; `preempted` and `restored`: requests
    since then; `waiting`, `admitted` and `available` (pages): as it ended."""

    at_s: float
    model_s: float
    host_s: float
    decoding: int
    prefill: int
    graph: str  # replayed, missed, or none where a step is not captured
    preempted: int
    restored: int
    waiting: int
    admitted: int
    available: int


@dataclass(slots=True)
class Waited:
    """Of a generation, since its latest token or its arrival. `own_s`: steps that it had a part in; `tiers`: tokens
    that came from each."""

    sums: Sums = _NOTHING
    queue_s: float = 0.0
    restore_s: float = 0.0
    own_s: float = 0.0
    tiers: dict[str, int] = field(default_factory=dict)


class Usual:
    """A running median by key: it moves towards each value by a share of itself. The first values count by their least,
    since what happens for the first time takes longer; the very first as no more than twice a neighbour's."""

    def __init__(self) -> None:
        self._known: dict[int, list[float]] = {}  # the median, and how many of the first values were seen

    def observe(self, key: int, value: float) -> float:
        """What was usual before this value: of the nearest key that is known, 0 where none is."""
        known = self._known.get(key)
        if known is None:
            near = self.of(key)
            self._known[key] = [min(value, 2 * near) if near else value, 1]
            return near
        before = known[0]
        if known[1] >= _FIRST:
            known[0] = before * (1.05 if value > before else 0.952)
        else:
            known[0], known[1] = min(before, value), known[1] + 1
        return before

    def of(self, key: int) -> float:
        """Of the nearest key that is known; 0 where none is."""
        if not self._known:
            return 0.0
        return self._known[min(self._known, key=lambda known: abs(known - key))][0]


class Spans:
    """See the module."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.restored = 0  # requests that had pages from a tier
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._waits: deque[dict[str, Any]] = deque(maxlen=WAITS)
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._firsts: deque[float] = deque(maxlen=WAITS)
        self._decode_s, self._between_s, self._interval_s = Usual(), Usual(), Usual()
        self._ended_s = 0.0  # of the step before, 0 where nobody had to wait since
        self._swap_s = self._copy_s = self._admit_s = 0.0  # since the step before
        self._preempted = self._restored = 0
        self._decoding = 0

    # -- steps ----------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Nobody runs: the time to the next step is nobody's."""
        self._ended_s = 0.0

    def swapped(self, seconds: float) -> None:
        """A request was sent back, or a page copied out in haste."""
        self._swap_s += seconds

    def copied(self, seconds: float) -> None:
        """Pages were copied for a tier."""
        self._copy_s += seconds

    def admitting(self, seconds: float) -> None:
        """Requests were admitted: their pages looked up, their first steps perhaps run ahead of them."""
        self._admit_s += seconds

    def since(self, begun_s: float, preemptions: int) -> tuple[float, int, int]:
        """Since the step before, when the host turns to the next: seconds while work waited, requests that were sent
        back and that had pages from a tier. `preemptions`: all so far."""
        host_s = begun_s - self._ended_s if self._ended_s else 0.0
        counted = host_s, preemptions - self._preempted, self.restored - self._restored
        self._preempted, self._restored = preemptions, self.restored
        return counted

    def step(self, step: Step) -> None:
        """A step ended."""
        self._steps.append(step)
        self._add(step)
        self._swap_s = self._copy_s = self._admit_s = 0.0
        self._decoding = step.decoding

    def ended(self, now_s: float, *, busy: bool) -> None:
        """`busy`: somebody waits for the next step."""
        self._ended_s = now_s if busy else 0.0

    def _add(self, step: Step) -> None:
        """What a step and the time before it add to the sums."""
        sums = self.sums
        prefill_s = missed_s = slow_s = 0.0
        if not step.prefill and step.graph != "missed":
            usual_s = self._decode_s.observe(step.decoding, step.model_s)
            slow_s = max(0.0, step.model_s - usual_s) if usual_s else 0.0
        elif not step.decoding:
            prefill_s = step.model_s
        else:
            usual_s = self._decode_s.of(step.decoding)
            over_s = max(0.0, step.model_s - usual_s) if usual_s else 0.0
            prefill_s, missed_s = (over_s, 0.0) if step.prefill else (0.0, over_s)
        known_s = self._swap_s + self._copy_s + self._admit_s
        host_over_s = 0.0
        if self._ended_s:
            host_s = max(0.0, step.host_s - known_s)
            host_over_s = max(0.0, host_s - self._between_s.observe(0, host_s))
        self.sums = Sums(
            sums.model_s + step.model_s,
            sums.prefill_s + prefill_s + self._admit_s,
            sums.missed_s + missed_s,
            sums.slow_s + slow_s,
            sums.host_s + host_over_s,
            sums.swap_s + self._swap_s,
            sums.copy_s + self._copy_s,
        )

    # -- waits ----------------------------------------------------------------------------------------------------

    def token(self, waited: Waited, seconds: float, now_s: float) -> None:
        """A generation has its next token, so long after the one before."""
        self._intervals.append(seconds)
        usual_s = self._interval_s.observe(self._decoding.bit_length(), seconds)
        if seconds > LONG_S and usual_s and seconds > LONG * usual_s:
            self._waits.append(self._made_of(waited, "token", seconds, usual_s, now_s))
        self._again(waited)

    def first(self, waited: Waited, seconds: float, now_s: float) -> None:
        """A generation has its first token, so long after it came."""
        self._firsts.append(seconds)
        over_s = seconds - waited.own_s
        if over_s > LONG_FIRST_S and over_s > LONG_FIRST * waited.own_s:
            self._waits.append(self._made_of(waited, "first", seconds, waited.own_s, now_s))
        self._again(waited)

    def running(self, waited: Waited, waited_s: float, tiers: dict[str, int]) -> None:
        """A generation has its pages, so long after it was admitted, so many tokens from each tier."""
        self.restored += bool(tiers)
        waited.restore_s += waited_s
        for tier, count in tiers.items():
            waited.tiers[tier] = waited.tiers.get(tier, 0) + count
        waited.sums = self.sums

    def _again(self, waited: Waited) -> None:
        waited.sums = self.sums
        waited.own_s = 0.0
        if waited.restore_s or waited.queue_s:
            waited.queue_s = waited.restore_s = 0.0
            waited.tiers = {}

    def _made_of(self, waited: Waited, kind: str, seconds: float, usual_s: float, now_s: float) -> dict[str, Any]:
        """Seconds by cause, which together are what the wait was longer than usual. Sent back, a request waits in the
        queue because of it; new, because others were there before."""
        grown = Sums(*(now - then for now, then in zip(self.sums, waited.sums, strict=True)))
        first = kind == "first"
        beside_s = max(0.0, grown.model_s - waited.own_s) if first else grown.prefill_s
        made = {
            "queue": waited.queue_s if first else 0.0,
            "prefill": beside_s,
            "preemption": grown.swap_s + (0.0 if first else waited.queue_s),
            "host": grown.host_s,
            "tier_io": waited.restore_s + grown.copy_s,
            "graph_miss": grown.missed_s,
        }
        rest_s = max(0.0, seconds - usual_s - sum(made.values()))
        return {
            "at_s": now_s,
            "kind": kind,
            "seconds": seconds,
            "usual_s": usual_s,
            "decoding": self._decoding,
            "tiers": dict(waited.tiers),
            "made_of": {**made, "rest": rest_s},
        }

    # -- what is told ---------------------------------------------------------------------------------------------

    def as_message(self, now_s: float) -> dict[str, Any]:
        """`steps` as rows under `columns`; times as the engine's clock has them, `now_s` among them."""
        return {
            "now_s": now_s,
            "sums": self.sums._asdict(),
            "intervals": _spread(list(self._intervals)),
            "firsts": _spread(list(self._firsts)),
            "columns": list(Step._fields),
            "steps": [list(step) for step in self._steps],
            "waits": list(self._waits),
        }


def _spread(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    quantiles = {f"p{share}_s": ordered[len(ordered) * share // 100] if ordered else None for share in (50, 95, 99)}
    return {"count": len(ordered), **quantiles, "max_s": ordered[-1] if ordered else None}
