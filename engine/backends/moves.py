"""Pages between the device and the host: what tiers and a backend say to each other. No torch.

out   gather: copies in host memory, taken after the steps that filled the pages
in    landing: host memory to read a page into; scatter: what lies there becomes the page, layer range by layer range

On a device with memory of its own both are asynchronous copies through host memory, ordered against steps by events.
Where pages are host memory, a landing is the page itself, and all events have happened (`HostPages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Moved(Protocol):
    """The end of a copy. Any thread may ask."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Copied:
    """Host copies of pages, which hold once `ready` is done. They never change after that."""

    pages: list[bytes]
    ready: Moved


class MovesPages(Protocol):
    """Called by the thread that steps the backend, between steps; none of it waits for a device."""

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        """Copies of (block, rows) pages as the steps so far left them, rows from `rows` on zero. The blocks may be
        written again at once."""
        ...

    def landing(self, block: int) -> memoryview:
        """`page_bytes` of writable host memory that a page for a held block may be read into, by any thread. It is the
        block's until the block is scattered to or released."""
        ...

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        """Makes what lies in these blocks' landings these layers of their pages; None: all layers. A step that is begun
        later and reads them waits for it by itself."""
        ...


class _Done:
    """Has happened."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Moved = _Done()


class HostPages:
    """`MovesPages` for a backend whose pages are host memory."""

    def page(self, block: int) -> memoryview:
        """See `Backend`."""
        raise NotImplementedError

    def snapshot(self, block: int, rows: int) -> bytes:
        """See `Backend`."""
        raise NotImplementedError

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        return Copied([self.snapshot(block, rows) for block, rows in pages], DONE)

    def landing(self, block: int) -> memoryview:
        return self.page(block)

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        return DONE
