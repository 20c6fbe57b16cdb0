"""What was decided about KV, what it was expected to cost, and what it did cost.

Entries are kept in a bounded ring and read by `since`; an entry that changes is told again. With a file, every
decision of the policy is also written whole, as `kvtier.policy.record` gives it, so that the same history can be
played under another policy.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from kvtier.policy import Move, View, record

KEPT = 20_000
FILE_BYTES = 64 * 2**20


@dataclass
class Decision:
    """One line of the log.

    at_s: since 1970. reason: tool_started, tool_ended, scheduled, pressure, asked (a step sent the intent) or
    api (somebody did, from outside).
    action: store, evict, prefetch, restore, recompute, pin, release, drop, keep; `place` is where to, or from where.
    predicted_s and realised_s: how long it takes, or, of an eviction, what its absence costs when the session is back.
    instead_s: what computing the same tokens would take. status: open, done, failed or moot.
    """

    seq: int
    at_s: float
    session: str
    step: int
    reason: str
    action: str
    place: str
    tokens: int
    bytes: int
    predicted_s: float | None = None
    realised_s: float | None = None
    instead_s: float | None = None
    status: str = "open"
    detail: str = ""
    version: int = 0


class DecisionLog:
    """Not thread-safe: the compute thread writes and reads it."""

    def __init__(
        self,
        file: Path | None = None,
        kept: int = KEPT,
        clock: Callable[[], float] = time.time,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._file = file
        self._kept = kept
        self._clock = clock
        self._file_bytes = file_bytes
        self._entries: OrderedDict[int, Decision] = OrderedDict()  # by seq, in the order of their versions
        self._seq = 0
        self._version = 0
        self.dropped = 0  # entries that left the ring
        self.file_failures = 0

    def check(self) -> None:
        """Raises RequestError (bad_request) where the file cannot be written."""
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise RequestError(
                "bad_request", f"the decision log {self._file} cannot be written: {error.strerror}; name another file"
            ) from error

    def add(self, session: str, reason: str, action: str, place: str, **fields: Any) -> Decision:
        self._seq += 1
        entry = Decision(self._seq, self._clock(), session, reason=reason, action=action, place=place, **fields)
        self._touch(entry)
        return entry

    def settle(self, entry: Decision, realised_s: float | None, status: str = "done", detail: str = "") -> None:
        """Once: what it took. A second call changes nothing."""
        if entry.status != "open":
            return
        entry.realised_s, entry.status = realised_s, status
        entry.detail = detail or entry.detail
        self._touch(entry)

    def since(self, version: int, limit: int = 1000) -> tuple[int, list[dict[str, Any]]]:
        """Entries that came or changed after `version`, oldest change first, and the version to ask for next."""
        changed = [entry for entry in self._entries.values() if entry.version > version][:limit]
        return (changed[-1].version if changed else max(version, 0)), [asdict(entry) for entry in changed]

    def whole(self, view: View, moves: list[Move]) -> Callable[[], None] | None:
        """A task that appends the decision to the file, for a thread that may block. None where there is no file."""
        if self._file is None:
            return None
        path, most = self._file, self._file_bytes

        def write() -> None:
            line = json.dumps(record(view, moves), separators=(",", ":"))
            try:
                if path.exists() and path.stat().st_size + len(line) > most:
                    path.replace(path.with_suffix(path.suffix + ".1"))
                with path.open("a", encoding="utf-8") as out:
                    out.write(line + "\n")
            except OSError:  # a log that cannot be written stops nothing
                self.file_failures += 1

        return write

    def _touch(self, entry: Decision) -> None:
        self._version += 1
        entry.version = self._version
        self._entries[entry.seq] = entry
        self._entries.move_to_end(entry.seq)
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)
            self.dropped += 1
