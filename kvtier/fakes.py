"""Stores that live in memory, for tests of whoever uses tiers. They pass the suite that the real ones pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvtier.counts import Tally, TierCounts
from kvtier.errors import TierIntegrityError
from kvtier.fileops import Buffer
from kvtier.store import fill
from kvtier.values import Filled, Stored, Wanted


class MemoryStore:
    """See `PageStore`. Pages in a dict."""

    def __init__(self, page_bytes: int, budget_bytes: int) -> None:
        self.page_bytes, self._budget = page_bytes, budget_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._tally = Tally()

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        keep = {*(key for key, _ in pages), *beside}
        with self._lock:
            for key in keep & self._pages.keys():
                self._pages.move_to_end(key)
            fresh = [page for page in pages if page[0] not in self._pages]
            written = 0
            for key, payload in fresh:
                if not self._make_room(keep):
                    break
                self._pages[key] = bytes(memoryview(payload).cast("B"))
                written += 1
            self._tally.add("stored", written)
            present = len(pages) - len(fresh) + written
            return Stored(present, written, "" if present == len(pages) else "the budget is used up")

    def _make_room(self, keep: set[bytes]) -> bool:
        while (len(self._pages) + 1) * self.page_bytes > self._budget:
            victim = next((key for key in self._pages if key not in keep), None)
            if victim is None:
                return False
            del self._pages[victim]
            self._tally.add("evicted", 1)
        return True

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        wanted = set(keys)
        with self._lock:
            found: dict[bytes, Buffer] = {key: self._pages[key] for key in wanted if key in self._pages}
            for key in found:
                self._pages.move_to_end(key)
            self._tally.add("hits", len(found))
            self._tally.add("misses", len(wanted) - len(found))
        return found

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        return fill(wanted, self.get(key for key, _ in wanted))

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._pages for key in keys]

    def delete(self, keys: Iterable[bytes]) -> int | None:
        with self._lock:
            gone = [self._pages.pop(key) for key in set(keys) if key in self._pages]
            self._tally.add("deleted", len(gone))
            return len(gone)

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._pages)

    def counts(self) -> TierCounts:
        with self._lock:
            used = sum(len(page) for page in self._pages.values())
            return self._tally.counts(len(self._pages), used, self._budget)

    def check_integrity(self) -> None:
        with self._lock:
            if len(self._pages) * self.page_bytes > self._budget:
                raise TierIntegrityError("memory: more pages than the budget allows")

    def close(self) -> None:
        """Pages stay, as they do on a medium."""


class MemoryObjects:
    """See `objects.Objects`. Blobs in a dict; several shared stores may be opened over one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        blob = b"".join(bytes(part) for part in parts)
        with self._lock:
            return self._blobs.setdefault(name, blob) is blob

    def read(self, name: str) -> Buffer | None:
        with self._lock:
            return self._blobs.get(name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._lock:
            found = [(name, len(blob)) for name, blob in self._blobs.items() if name.startswith(prefix)]
        return iter(found)

    def remove(self, name: str) -> None:
        with self._lock:
            self._blobs.pop(name, None)

    def close(self) -> None:
        """Blobs stay, as they do on a medium."""
