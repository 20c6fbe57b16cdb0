"""Whether a tier below the device is worth having, for traffic that was recorded.

Two kinds of lines are understood: requests (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`: one
for each 512 tokens of a prompt, equal for equal prefixes), and whole sessions of an agent (`messages`, `tool_seconds`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from engine.capacity import formulas as f
from engine.capacity.placement import Placement
from engine.capacity.plan import Planned
from engine.errors import PlanError

BLOCK_TOKENS: Final = 512
CHARACTERS_PER_TOKEN: Final = 4
HOST_GB, NVME_GB = 512.0, 3840.0
_WORTH: Final = 0.01  # of the time that computing prompts takes; less is not worth a tier's trouble
_MOST_LINES: Final = 1_000_000
_MOST_TOKENS: Final = 1 << 24


@dataclass(frozen=True)
class TraceTier:
    """`returned_tokens`: of prompts that lay in this tier. `restored_tokens`: of those, where reading is quicker than
    computing. `saved_s`: device time that it saves."""

    tier: str
    size_gb: float
    returned_tokens: int
    restored_tokens: int
    read_s: float
    saved_s: float
    worth: bool


@dataclass(frozen=True)
class TraceReport:
    """`computed_s`: device time that prompts take without tiers; `device_tokens`: those that the device still had."""

    kind: str
    count: int
    tokens: int
    device_tokens: int
    computed_s: float
    tiers: list[TraceTier]
    verdict: str
    assumed: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Tally:
    """What one tier did. Each piece is restored only where that is quicker: a tier must never make things slower."""

    name: str
    bps: float
    latency_s: float
    size_gb: float
    returned: int = 0
    restored: int = 0
    read_s: float = 0.0
    saved_s: float = 0.0

    def came_back(self, place: Placement, start: int, stop: int, part: float = 1.0) -> None:
        if stop <= start:
            return
        groups, dtype = place.facts.groups, place.terms.kv_dtype
        size = f.session_bytes(groups, dtype, stop) - (f.session_bytes(groups, dtype, start) if start else 0)
        read_s, compute_s = self.latency_s + max(0, size) / self.bps, place.prefill_s(stop, start)
        self.returned += round((stop - start) * part)
        if read_s < compute_s:
            self.restored += round((stop - start) * part)
            self.read_s += read_s * part
            self.saved_s += (compute_s - read_s) * part


@dataclass(frozen=True)
class TierSizes:
    """Bytes per second come from the plan; these are sizes."""

    host_gb: float = HOST_GB
    nvme_gb: float = NVME_GB

    def __post_init__(self) -> None:
        for name in ("host_gb", "nvme_gb"):
            if not (math.isfinite(getattr(self, name)) and 0 < getattr(self, name) <= 1e6):
                raise PlanError(name, f"{getattr(self, name)} is not a number above 0 to 1e+06")


@dataclass
class _Lru:
    """Which blocks a memory of so many still has. Larger ones have all that smaller ones have."""

    blocks: int
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def prefix(self, ids: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        return next((at for at, one in enumerate(ids) if one not in self.held), len(ids))

    def use(self, ids: Sequence[int]) -> None:
        """Last block first, so that a prefix outlives what follows it."""
        for one in reversed(ids):
            self.held[one] = None
            self.held.move_to_end(one)
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)


def read_trace(planned: Planned, lines: Iterable[str | bytes], sizes: TierSizes) -> TraceReport:
    """What the tiers would do for this traffic. Raises PlanError, which names the line that is wrong."""
    rows = _rows(lines)
    first = next(rows, None)
    if first is None:
        raise PlanError("trace", "it has no lines")
    if not planned.plan.users_by_memory:
        raise PlanError("trace", f"nothing can be said of traffic where no session fits; {planned.plan.verdict}")
    report = _requests if "hash_ids" in first[1] else _sessions
    return report(planned, _chained(first, rows), sizes)


def _chained(first: tuple[int, dict[str, Any]], rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Any]:
    yield first
    yield from rows


def _rows(lines: Iterable[str | bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if number > _MOST_LINES:
            raise PlanError("trace", f"it has more than {_MOST_LINES} lines; give a part of it")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise PlanError("trace", f"line {number} is not JSON") from None
        if not isinstance(row, dict) or not ("hash_ids" in row or "messages" in row):
            raise PlanError("trace", f"line {number} is neither a request (hash_ids) nor a session (messages)")
        yield number, row


def _tallies(planned: Planned, sizes: TierSizes) -> list[_Tally]:
    speeds = {one.tier: one.gb_s * 1e9 for one in planned.plan.tiers}
    return [
        _Tally("host", speeds["host"], 2e-4, sizes.host_gb),
        _Tally("nvme", speeds["nvme"], 1e-3, sizes.nvme_gb),
    ]


def _requests(planned: Planned, rows: Iterable[tuple[int, dict[str, Any]]], sizes: TierSizes) -> TraceReport:
    place, tallies = planned.placement, _tallies(planned, sizes)
    block = BLOCK_TOKENS * f.kv_bytes_per_token(place.facts.groups, place.terms.kv_dtype, planned.plan.context)
    if not block:
        raise PlanError("trace", f"{place.facts.name} keeps no prefixes, only states; there is nothing to look up")
    room = [float(place.room) * place.degree / float(place.replication)]
    for one in tallies:
        room.append(room[-1] + one.size_gb * 1e9)
    memories = [_Lru(int(size // block)) for size in room]
    count = tokens = on_device = 0
    computed_s = 0.0
    for number, row in rows:
        length, ids = _length(row, number), _ids(row, number)
        ends = [
            min(length - 1, memory.prefix(ids) * BLOCK_TOKENS) for memory in memories
        ]  # one token is always computed
        computed_s += place.prefill_s(length, ends[0])
        for tally, start, stop in zip(tallies, ends, ends[1:], strict=False):
            tally.came_back(place, start, stop)
        for memory in memories:
            memory.use(ids)
        count, tokens, on_device = count + 1, tokens + length, on_device + ends[0]
    return _report("requests", count, tokens, on_device, computed_s, tallies, [])


def _length(row: dict[str, Any], number: int) -> int:
    value = row.get("input_length")
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise PlanError("trace", f"line {number}: input_length is no whole number from 1 to {_MOST_TOKENS}")
    return value


def _ids(row: dict[str, Any], number: int) -> list[int]:
    value = row["hash_ids"]
    if not isinstance(value, list) or not all(type(one) is int for one in value) or len(value) > 1 << 16:
        raise PlanError("trace", f"line {number}: hash_ids is no list of whole numbers")
    return value


def _sessions(planned: Planned, rows: Iterable[tuple[int, dict[str, Any]]], sizes: TierSizes) -> TraceReport:
    """Each session pauses for its tools. Of `users` sessions the device holds a part; the rest have left it when they
    come back, and lie in the first tier that has room."""
    place, plan, tallies = planned.placement, planned.plan, _tallies(planned, sizes)
    users = planned.terms.users or 2 * plan.users_by_memory
    assumed = [f"{CHARACTERS_PER_TOKEN} characters a token"]
    if planned.terms.users is None:
        assumed.append(f"users {users}, twice what the device holds")
    away = _parts(users, plan.users_by_memory, plan.kv_bytes_per_session, tallies)
    pauses: list[tuple[int, float | None]] = []
    count = 0
    for number, row in rows:
        pauses += _pauses(row, number)
        count += 1
    known = [seconds for _, seconds in pauses if seconds is not None]
    usual = statistics.median(known) if known else 0.0
    missing = len(pauses) - len(known)
    if missing:
        assumed.append(
            f"{missing} of {len(pauses)} pauses are not recorded and last {usual:.2g} s, as the usual one does"
        )
    computed_s = sum(place.prefill_s(n) for n, _ in pauses) * sum(away)
    for tally, part in zip(tallies, away, strict=True):
        for n, seconds in pauses:
            size = f.session_bytes(place.facts.groups, place.terms.kv_dtype, n)
            if size / tally.bps <= (usual if seconds is None else seconds):  # else it comes back before it has gone
                tally.came_back(place, 0, n, part)
    tokens = sum(n for n, _ in pauses)
    here = round(tokens * (1 - sum(away)))
    return _report("sessions", count, tokens, here, computed_s, tallies, assumed)


def _parts(users: int, held: int, size: int, tallies: Sequence[_Tally]) -> list[float]:
    """Which part of all sessions lies in each tier."""
    left, parts = max(0, users - held), []
    for one in tallies:
        here = min(left, int(one.size_gb * 1e9 // size)) if size else left
        parts.append(here / users)
        left -= here
    return parts


def _pauses(row: dict[str, Any], number: int) -> Iterator[tuple[int, float | None]]:
    """Tokens so far and seconds, of each tool call of a session."""
    messages, seconds = row["messages"], row.get("tool_seconds", [])
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise PlanError("trace", f"line {number}: messages is no list of objects")
    if not isinstance(seconds, list) or not all(one is None or _is_time(one) for one in seconds):
        raise PlanError("trace", f"line {number}: tool_seconds is no list of seconds or nulls")
    characters, call = 0, 0
    for message in messages:
        if message.get("role") == "tool" and characters:
            n = min(max(1, characters // CHARACTERS_PER_TOKEN), _MOST_TOKENS)
            yield n, seconds[call] if call < len(seconds) else None
            call += 1
        content = message.get("content")
        characters += len(content if isinstance(content, str) else json.dumps(content))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _report(
    kind: str,
    count: int,
    tokens: int,
    on_device: int,
    computed_s: float,
    tallies: Sequence[_Tally],
    assumed: list[str],
) -> TraceReport:
    tiers = [
        TraceTier(
            one.name,
            one.size_gb,
            one.returned,
            one.restored,
            one.read_s,
            one.saved_s,
            one.saved_s > 0 and one.saved_s >= _WORTH * computed_s,
        )
        for one in tallies
    ]
    return TraceReport(kind, count, tokens, on_device, computed_s, tiers, _verdict(tiers, computed_s), assumed)


def _verdict(tiers: Sequence[TraceTier], computed_s: float) -> str:
    worth = [one for one in tiers if one.worth]
    if worth:
        saved = sum(one.saved_s for one in worth)
        names = " and ".join(one.tier for one in worth)
        return f"worth it: {names} would save {saved:,.3g} s of {computed_s:,.3g} s of computing prompts"
    if not any(one.returned_tokens for one in tiers):
        return "not worth it: nothing comes back that the device does not hold anyway"
    if not any(one.restored_tokens for one in tiers):
        return "not worth it: what comes back is computed more quickly than it is read"
    return f"not worth it: it would save less than {_WORTH:.0%} of the time that prompts take"
