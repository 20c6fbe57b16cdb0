"""The places of a simulated machine, what lies in them, and the moves that a policy may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bench.policy_load import NEVER_S
from bench.policy_machine import Hardware, Link, Outcome, Slot
from kvtier.policy import Move, Place, SessionView


class Machine:
    """Each tier's link serves reads one after another and writes one after another.

    A copy is readable when its write has ended, and room on the device is there when what lay in it is written. What a
    demotion leaves in a tier is free at once, as if the bytes in flight had a buffer of their own. `ends_s`: when each
    pause ends, for a prophet.
    """

    def __init__(self, hardware: Hardware, ends_s: dict[tuple[str, int], float] | None = None) -> None:
        self.hardware = hardware
        self.now_s = 0.0
        self.outcome = Outcome()
        self.tiers = {tier.place: tier for tier in hardware.tiers()}
        self.used = dict.fromkeys(self.tiers, 0)
        self.reads = {place: Link() for place in self.tiers}
        self.writes = {place: Link() for place in self.tiers}
        self.sessions: dict[str, SessionView] = {}
        self.slots: dict[str, Slot] = {}
        self.taxed_s = 0.0
        self.leaving: list[tuple[float, int]] = []
        self.ends_s = {} if ends_s is None else ends_s

    def _apply(self, moves: Iterable[Move]) -> None:
        for move in moves:
            slot, session = self.slots[move.session], self.sessions[move.session]
            if move.kind == "store":
                self._store(move, slot, session)
            elif move.kind == "trim":
                self.used[move.place] -= (move.start - session.copy_from) * self.hardware.bytes_per_token
                self._become(move.session, copy_from=move.start)
            elif move.kind == "prefetch":
                self._promote(move, slot, session)
            elif move.place is Place.DEVICE:
                self._leave(session)
                if session.copy is not None:
                    self.leaving.append((slot.copy_ready_s, session.tokens * self.hardware.bytes_per_token))
            else:
                self._forget(session)
            self._bury(move.session)
        over = [place for place in self.tiers if self.used[place] > self.tiers[place].capacity_bytes]
        assert not over, f"{over} hold more than they can"

    def _room_s(self, size: int) -> float:
        """When so many of the device's free bytes are rid of what is still being written from them."""
        self.leaving = sorted(one for one in self.leaving if one[0] > self.now_s)
        clean = self._free(Place.DEVICE) - sum(left for _, left in self.leaving)
        room_s = self.now_s
        for written_s, left in self.leaving:
            if clean >= size:
                break
            clean, room_s = clean + left, written_s
        return room_s

    def _read(self, move: Move, slot: Slot, after_s: float) -> float:
        """When the bytes of a prefetch are on the device."""
        tier = self.tiers[move.place]
        takes_s = tier.read_s(move.size_bytes)
        ready_s = self.reads[move.place].book(max(after_s, slot.copy_ready_s), takes_s, move.size_bytes)
        self.taxed_s += takes_s * tier.tax
        self.outcome.restored_bytes += move.size_bytes
        slot.promoted_bytes += move.size_bytes
        return ready_s

    def _promote(self, move: Move, slot: Slot, session: SessionView) -> None:
        """A prefetch that no turn asked for: of a whole copy, where there is room."""
        size = session.tokens * self.hardware.bytes_per_token
        whole = session.copy is move.place and (session.copy_from, session.copy_to) == (0, session.tokens)
        if whole and not session.resident and self._free(Place.DEVICE) >= size:
            self.used[Place.DEVICE] += size
            slot.copy_ready_s = self._read(move, slot, self.now_s)
            self._become(session.id, resident=True)

    def _leave(self, session: SessionView) -> None:
        assert session.resident
        assert not session.held
        self.used[Place.DEVICE] -= session.tokens * self.hardware.bytes_per_token
        self._become(session.id, resident=False)
        slot = self.slots[session.id]
        self.outcome.promoted_unused_bytes += slot.promoted_bytes
        slot.promoted_bytes = 0

    def _bury(self, name: str) -> None:
        """A session that never comes back is gone once nothing holds it."""
        session = self.sessions[name]
        gone = self.ends_s.get((name, self.slots[name].index), 0.0) - self.now_s > NEVER_S / 2
        if gone and not session.resident and session.copy is None:
            del self.sessions[name], self.slots[name]

    def _store(self, move: Move, slot: Slot, session: SessionView) -> None:
        tier = self.tiers[move.place]
        begin_s = max(self.now_s, slot.copy_ready_s) if session.copy is not move.place else self.now_s
        self._forget(session)
        takes_s = tier.write_s(move.size_bytes)
        slot.copy_ready_s = self.writes[move.place].book(begin_s, takes_s, move.size_bytes)
        self.taxed_s += takes_s * tier.tax
        self.outcome.stored_bytes += move.size_bytes
        self.used[move.place] += (session.tokens - move.start) * self.hardware.bytes_per_token
        self._become(move.session, copy=move.place, copy_from=move.start, copy_to=session.tokens)

    def _forget(self, session: SessionView) -> None:
        if session.copy is not None:
            self.used[session.copy] -= (session.copy_to - session.copy_from) * self.hardware.bytes_per_token
            self._become(session.id, copy=None, copy_from=0, copy_to=0)

    def _free(self, place: Place) -> int:
        return self.tiers[place].capacity_bytes - self.used[place]

    def _become(self, name: str, **changes: object) -> None:
        self.sessions[name] = dataclasses.replace(self.sessions[name], **changes)  # type: ignore[arg-type]
