"""Every counter of a tier, and what it means."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class TierCounts:
    """One tier. The first three are as of now, the rest since it was opened; pages unless the name says otherwise.

    pages           in the index
    used_bytes      on the medium, headers, manifests, foreign files and quarantine included
    budget_bytes    what used_bytes never exceeds
    stored          written
    hits, misses    answers of `get`
    evicted         removed to make room
    deleted         removed because they were asked to be
    adopted         found at opening
    quarantined     found damaged (pages, or segments at opening), set aside and never served
    foreign         segments of another model, layout or format version; missing, and first to go
    undecodable     whole, but written with a key that the key ring does not give; misses
    io_errors       operations that the medium refused
    timeouts        reads that took longer than the deadline; misses
    swept           half files, second copies and strays removed
    recreated       times that the directory had vanished and was made anew
    coded_bytes     payload bytes before compression and encryption ...
    stored_bytes    ... and after, of what was stored
    """

    pages: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    deleted: int = 0
    adopted: int = 0
    quarantined: int = 0
    foreign: int = 0
    undecodable: int = 0
    io_errors: int = 0
    timeouts: int = 0
    swept: int = 0
    recreated: int = 0
    coded_bytes: int = 0
    stored_bytes: int = 0


_NAMES: Final = {one.name for one in fields(TierCounts)} - {"pages", "used_bytes", "budget_bytes"}


class Tally:
    """A tier's counters since it was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, name: str, by: int = 1) -> None:
        assert name in _NAMES, name
        with self._lock:
            self._counts[name] += by

    def counts(self, pages: int, used_bytes: int, budget_bytes: int) -> TierCounts:
        with self._lock:
            return TierCounts(pages, used_bytes, budget_bytes, **self._counts)
