"""What every tier is: the one protocol that `TierStack` speaks, and that one contract suite checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvtier.counts import TierCounts
from kvtier.fileops import Buffer
from kvtier.values import Filled, Stored, Wanted


class PageStore(Protocol):
    """Pages by key, in one place. Thread-safe; every call may block.

    Storage that fails does not raise: a page that cannot be kept is not `present`, one that cannot be read or
    does not verify is a miss, and both are counted. What comes back is what was put, byte for byte, or nothing.
    """

    page_bytes: int

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        """Stores pages with distinct keys; a key that is there keeps its bytes.

        Other pages may go to make room, least recently used first, but none of this call nor those `beside` it.
        """
        ...

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        """Verified copies of those pages that are here, each `page_bytes` long and the caller's own."""
        ...

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        """As `get`, into the caller's memory: `page_bytes` of it for each of the distinct keys, verified in place.

        Memory of a key that is not among the answer's has undefined contents, and may change while its read is late.
        """
        ...

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here, from the index alone; nothing is read."""
        ...

    def delete(self, keys: Iterable[bytes]) -> int | None:
        """How many pages went: this store does not serve them again until they are put again.

        None where another process holds the right to delete.
        """
        ...

    def keys(self) -> set[bytes]:
        """Every key that is here."""
        ...

    def counts(self) -> TierCounts:
        """What is here now, and what happened since the store was opened."""
        ...

    def check_integrity(self) -> None:
        """Raises TierIntegrityError where accounts and storage disagree."""
        ...

    def close(self) -> None:
        """Pages stay, for the next one to adopt."""
        ...


def fill(wanted: Sequence[Wanted], found: Mapping[bytes, Buffer]) -> Filled:
    """Copies pages to where they are wanted."""
    keys = {key for key, _ in wanted if key in found}
    for key, room in wanted:
        if key in keys:
            room[:] = memoryview(found[key]).cast("B")
    return Filled(keys)
