"""Pages between the device and the host: what tiers and a backend say to each other. No torch.

out   gather: copies in host memory, taken after the steps that filled the pages
in    landing: host memory to read a page into; scatter: what lies there becomes the page, layer range by layer range

On a device with memory of its own both are asynchronous copies through host memory, ordered against steps by events.
Where pages are host memory, a landing is the page itself, and all events have happened (`HostPages`).
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import ArrivalFailed


class Moved(Protocol):
    """The end of a copy. Any thread may ask."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Copied:
    """Host copies of pages, which hold once `ready` is done. They never change after that."""

    pages: Sequence[bytes | memoryview]
    ready: Moved


class Arrival(Protocol):
    """Pages that come while a step reads them, layer by layer. `land` and `fail` may come from any thread."""

    def land(self, layers: int) -> None:
        """So many layers of all of them are in their landings."""
        ...

    def fail(self) -> None:
        """The rest does not come: a step that waits for it raises ArrivalFailed. Nothing happens once all are there."""
        ...


class MovesPages(Protocol):
    """Called by the thread that steps the backend, between steps; none of it waits for a device."""

    overlaps: bool  # whether it pays to begin a step while its pages come

    @property
    def layers(self) -> int: ...

    def expect(self, blocks: Sequence[int]) -> Arrival:
        """An arrival of pages in these blocks, for one step of this backend. Where pages are not host memory, `land`
        scatters the layers that have come."""
        ...

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        """Copies of (block, rows) pages as the steps so far left them, rows from `rows` on zero. The blocks may be
        written again at once."""
        ...

    def landing(self, block: int) -> memoryview:
        """`page_bytes` of writable host memory that a page for a held block may be read into, by any thread: its layers
        one after the other, of one length. It is the block's until the block is scattered to or released."""
        ...

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        """Makes what lies in these blocks' landings these layers of their pages; None: all layers. A step that is begun
        later and reads them waits for it by itself."""
        ...


class WholeArrival:
    """See `Arrival`: for backends that wait for all layers."""

    def __init__(self, layers: int) -> None:
        self._layers, self._known, self._failed = layers, threading.Event(), False

    def land(self, layers: int) -> None:
        if layers >= self._layers:
            self._known.set()

    def fail(self) -> None:
        if not self._known.is_set():
            self._failed = True
            self._known.set()

    def wait(self) -> None:
        """Until all layers are there. Raises ArrivalFailed."""
        self._known.wait()
        if self._failed:
            raise ArrivalFailed("pages that a step was to read did not come")


class _Done:
    """Has happened."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Moved = _Done()


class HostPages(abc.ABC):
    """`MovesPages` for a backend whose pages are host memory; `expect` is its own."""

    overlaps: bool = False

    @abc.abstractmethod
    def page(self, block: int) -> memoryview:
        """The bytes of one page, `page_bytes` long, writable. They may be read by others while no step writes them."""

    @abc.abstractmethod
    def snapshot(self, block: int, rows: int) -> bytes:
        """See `Backend`."""

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        return Copied([self.snapshot(block, rows) for block, rows in pages], DONE)

    def landing(self, block: int) -> memoryview:
        return self.page(block)

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        return DONE
