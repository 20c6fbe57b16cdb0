"""Pages that arrive in stripes: the first bytes of every page before the next bytes of any.

A step that reads pages layer by layer can begin when the first layers of all of them are there. Each reader has pages
of its own and goes through them stripe by stripe, hashing on the way, so a digest is whole with the last stripe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvtier.index import Held
from kvtier.values import Wanted


@dataclass(frozen=True, slots=True)
class Stripes:
    """Where each stripe of a page ends, in bytes, the last one at the page's end.

    `landed(n)` is told, in order and from any thread, that n stripes of all pages lie in memory, not yet verified. What
    does not come within `deadline_s` is late.
    """

    ends: Sequence[int]
    landed: Callable[[int], None]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Striped:
    """A page to be read in stripes: its row of a segment, where that begins in the file, and where it goes."""

    held: Held
    row: int
    begin: int
    room: memoryview


class Progress:
    """How many of several readers have each stripe."""

    def __init__(self, stripes: Stripes, readers: int) -> None:
        self._stripes, self._lock = stripes, threading.Lock()
        self._missing = [readers] * len(stripes.ends)
        self._told = 0

    def mark(self, stripe: int) -> None:
        """One more reader has this stripe of its pages."""
        with self._lock:
            self._missing[stripe] -= 1
            while self._told < len(self._missing) and not self._missing[self._told]:
                self._told += 1
                self._stripes.landed(self._told)


def shares_of(
    located: Sequence[tuple[Held, Sequence[int]]], wanted: Sequence[Wanted], count: int
) -> list[list[Striped]]:
    """Pages in the order of the disk, in `count` runs of about the same length, none of them empty."""
    rooms = dict(wanted)
    pages: list[Striped] = []
    for held, rows in located:
        begins = list(accumulate((size for _, _, size in held.header.rows), initial=held.header.payload_offset))
        pages += [Striped(held, row, begins[row], rooms[held.header.rows[row][0]]) for row in rows]
    count = min(count, len(pages))
    return [pages[len(pages) * at // count : len(pages) * (at + 1) // count] for at in range(count)]
