"""What the tier policy sees of a running engine: hints of what lies where, what was measured, who waits."""

from __future__ import annotations

from collections.abc import Callable

from engine.core import EngineCore
from engine.facts import PAGE_SIZE
from engine.kvcall import PauseHint
from engine.request import Phase
from engine.sessions import SessionKv
from engine.speeds import Speeds
from kvtier import Tier, TierCounts, TierStats
from kvtier.policy import Place, Reason, SessionView, State, TierView, View

TIER_OF = {Place.HOST: Tier.HOST, Place.NVME: Tier.NVME}
_PLACE_OF = {tier: place for place, tier in TIER_OF.items()}
_FILL = 0.95  # of a tier's budget: headers, alignment and what is being rewritten take the rest
_TAX = {Tier.HOST: 0.25, Tier.NVME: 0.05}  # of a transfer's time, lost to the engine: copies take its cores
_FAST = 1e12  # bytes per second, where nothing is known: who never tried must try


class Sight:
    """`usage`: what the tiers said of themselves last."""

    def __init__(self, core: EngineCore, speeds: Speeds, clock: Callable[[], float]) -> None:
        self.usage: TierStats | None = core.store.stack.stats() if core.store.stack is not None else None
        self.token_bytes = core.store.page_bytes // PAGE_SIZE
        self._core = core
        self._store = core.store
        self._speeds = speeds
        self._clock = clock

    def view(self, reason: Reason, subject: SessionKv) -> View:
        running = {request.spec.session: request.phase for request in self._core.scheduler.requests()}
        records = {record.name: record for record in self._store.sessions.all() if record.keys}
        records[subject.name] = subject
        prefill = self._speeds.scaled_prefill
        return View(
            now_s=self._clock(),
            reason=reason,
            subject=subject.name,
            sessions={name: self._session(record, running.get(name)) for name, record in records.items()},
            tiers=self.tiers(),
            prefill=prefill,
            bytes_per_token=self.token_bytes,
            waiting=self._core.scheduler.waiting,
            service_s=self._speeds.turn_s,
        )

    def _session(self, record: SessionKv, phase: Phase | None) -> SessionView:
        pause = record.pause or PauseHint()
        state = pause.state
        if phase is not None:
            state = State.RUNNING if phase is Phase.RUNNING else State.WAITING
        copy = _PLACE_OF.get(record.copy) if record.copy is not None else None
        return SessionView(
            id=record.name,
            tokens=len(record.tokens),
            state=state,
            since_s=record.since_s,
            tool=pause.tool or pause.state.value,
            timeout_s=pause.timeout_s,
            born_s=record.born_s,
            resident=self.resident(record),
            copy=copy,
            copy_to=record.copy_to if copy is not None else 0,
            held=phase is not None or bool(record.pinned_blocks),
            turn=record.turns,
        )

    def resident(self, record: SessionKv) -> bool:
        """By its first and its last page: pages of a session come and go together."""
        find = self._store.pool.find
        return bool(record.keys) and find(record.keys[0]) is not None and find(record.keys[-1]) is not None

    def tiers(self) -> tuple[TierView, ...]:
        pool, page_bytes = self._store.pool, self._store.page_bytes
        device = TierView(Place.DEVICE, pool.total * page_bytes, (pool.total - pool.available) * page_bytes)
        if self.usage is None:
            return (device,)
        found = [device]
        counts = {Tier.HOST: self.usage.host, Tier.NVME: self.usage.nvme}
        for place, tier in TIER_OF.items():
            if counts[tier].budget_bytes:
                found.append(self._tier(place, counts[tier]))
        return tuple(found)

    def _tier(self, place: Place, counts: TierCounts) -> TierView:
        tier = TIER_OF[place]
        link = self._speeds.links[tier]
        # In bytes of pages: on the medium one takes more (headers, alignment) or less (compression) than it has.
        payload = counts.pages * self._store.page_bytes
        scale = payload / counts.used_bytes if payload and counts.used_bytes else 1.0
        capacity, used = int(_FILL * scale * counts.budget_bytes), int(scale * counts.used_bytes)
        return TierView(
            place,
            capacity,
            min(capacity, used),
            read_bps=link.read_bps or _FAST,
            write_bps=link.write_bps or link.read_bps or _FAST,
            latency_s=link.latency_s,
            tax=_TAX[tier],
        )
