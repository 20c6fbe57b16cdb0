"""Pages from the tiers into blocks of the pool. Books are kept on the compute thread; the readers' threads only read.

A page that is wanted gets a block at once, and is read straight into it:

    take ──> flight (a reader writes into the block; nobody else knows it)
               ├── verified ──> indexed; whoever waited holds it
               ├── no page ───> zeroed, given back
               └── late ──────> kept until its reader has let go of it, then zeroed and given back

Whoever wants a page that is in flight waits for that flight. A flight goes on when nobody waits any more: a block that
a thread may still write into is never given to anyone else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.backends.face import Backend
from engine.backends.moves import Arrival
from engine.copies import Staged
from engine.facts import PAGE_SIZE
from engine.lanes import Lanes
from engine.pages import PagePool
from kvtier import Landed, Stripes, Tier, TierStack, Wanted

STRIPE_BYTES = 192 * 1024  # of a page, in a read of a stream: smaller ones cost more in calls than they win
STREAM_DEADLINE_S = 1.0  # of a stream, beside the time that the slowest disk worth waiting for takes
LEAST_BYTES_PER_S = 64 * 1024 * 1024


@dataclass(frozen=True)
class Page:
    """A page that is wanted on the device: `rows` of it carry tokens of the tenant that `salt_id` names."""

    key: bytes
    rows: int
    salt_id: bytes


class Places(Protocol):
    """Where blocks come from, and how they become pages."""

    @property
    def backend(self) -> Backend: ...

    @property
    def pool(self) -> PagePool: ...

    def take(self) -> int:
        """A block with one reference."""
        ...

    def index(self, block: int, page: Page) -> None:
        """This block is that page from now on, and a tier has it too."""
        ...


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for pages. `then` is called whenever some have come, or turned out not to.

    held: key -> block of those that came, one reference each; None: they need not be held
    waiting: keys of pages on their way; taking: blocks that are held by flights that this one began
    tiers: of the pages that were read for this one, and not for another who began earlier
    """

    then: Callable[[Waiter], None]
    held: dict[bytes, int] | None = None
    waiting: set[bytes] = field(default_factory=set)
    taking: int = 0
    tiers: dict[bytes, Tier] = field(default_factory=dict)


@dataclass(eq=False)
class _Flight:
    pages: list[Page]
    blocks: dict[bytes, int]
    owner: Waiter
    streams: bool = False
    joined: list[Waiter] = field(default_factory=list)
    unwanted: set[bytes] = field(default_factory=set)

    @property
    def waiters(self) -> list[Waiter]:
        return [self.owner, *self.joined]


class Transfers:
    """`staged` holds pages until some time after a tier has them; those need no reading."""

    def __init__(self, stack: TierStack, staged: Mapping[bytes, Staged], lanes: Lanes, places: Places) -> None:
        self._stack, self._staged, self._lanes, self._places = stack, staged, lanes, places
        self._flying: dict[bytes, _Flight] = {}
        self._late: dict[int, Future[Any]] = {}
        self.joined = 0  # pages that came with another's transfer

    # -- asking ---------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        written_soon = [Tier.HOST if key in self._staged else None for key in keys]
        return [place or soon for place, soon in zip(self._stack.lookup(keys), written_soon, strict=True)]

    def refresh(self, then: Callable[[], None]) -> bool:
        """List the shared store anew, then `then`. False where there is none."""
        if self._stack.config.shared is None:
            return False
        self._lanes.read(self._stack.refresh, lambda _: then())
        return True

    @property
    def busy(self) -> bool:
        """Whether blocks are held here; every one that is given back comes with a command to the compute thread."""
        return bool(self._flying or self._late)

    @property
    def late_pages(self) -> int:
        """Blocks that nobody can have because a read that was given up may still write into them."""
        return len(self._late)

    def blocks(self) -> list[int]:
        """Every block that is held here, each with one reference."""
        flights = {id(flight): flight for flight in self._flying.values()}
        return [block for flight in flights.values() for block in flight.blocks.values()] + list(self._late)

    # -- moving ---------------------------------------------------------------------------------------------------

    def begin(self, pages: Sequence[Page], waiter: Waiter) -> None:
        """Bring these pages, the first ones as far as there is room. Nothing is on its way if `waiter.waiting` is empty
        then."""
        mine: list[Page] = []
        for page in pages:
            flight = self._flying.get(page.key)
            if flight is not None:
                waiter.waiting.add(page.key)
                if waiter not in flight.joined:
                    flight.joined.append(waiter)
                self.joined += 1
            elif self._places.pool.find(page.key) is not None:
                self._hold(waiter, page.key)
            else:
                mine.append(page)
        mine = mine[: self._places.pool.available]
        if mine:
            self._fly(mine, waiter)

    def all_on_nvme(self, pages: Sequence[Page]) -> bool:
        """Whether all of them would have to be read from there, and by nobody but who asks."""
        keys = [page.key for page in pages]
        if any(key in self._flying or self._places.pool.find(key) is not None for key in keys):
            return False
        return all(place is Tier.NVME for place in self.lookup(keys))

    def stream(self, pages: Sequence[Page], waiter: Waiter) -> tuple[Arrival, dict[bytes, int]]:
        """As `begin`, for a step that reads the pages while they come: what it waits for, and the block of each page.

        A partial page is not indexed when it comes, for the step writes behind its rows: it is the waiter's alone, and
        only if everything came.
        """
        flight = self._flight(pages, waiter, streams=True)
        backend, rooms = self._places.backend, self._rooms(flight)
        arrival = backend.expect(list(flight.blocks.values()))
        layer_bytes = rooms[0][1].nbytes // backend.layers
        each = max(1, STRIPE_BYTES // layer_bytes)
        ends = [*range(each, backend.layers, each), backend.layers]
        deadline_s = STREAM_DEADLINE_S + len(pages) * rooms[0][1].nbytes / LEAST_BYTES_PER_S
        stripes = Stripes([end * layer_bytes for end in ends], lambda count: arrival.land(ends[count - 1]), deadline_s)
        self._lanes.read(lambda: _stream(self._stack, rooms, stripes, arrival), lambda read: self._land(flight, read))
        return arrival, flight.blocks

    def give_up(self, waiter: Waiter) -> None:
        """It does not wait any more, and is not called again. What it holds is its own to release."""
        waiter.waiting.clear()

    def forget(self, key: bytes) -> None:
        """If this page is in flight it is not to be indexed when it comes, unless somebody waits to hold it."""
        flight = self._flying.get(key)
        if flight is not None:
            flight.unwanted.add(key)

    def _flight(self, pages: Sequence[Page], owner: Waiter, streams: bool = False) -> _Flight:
        flight = _Flight(list(pages), {page.key: self._places.take() for page in pages}, owner, streams)
        self._flying |= {page.key: flight for page in pages}
        owner.waiting |= flight.blocks.keys()
        owner.taking += len(pages)
        return flight

    def _rooms(self, flight: _Flight) -> list[Wanted]:
        return [(key, self._places.backend.landing(block)) for key, block in flight.blocks.items()]

    def _fly(self, pages: list[Page], owner: Waiter) -> None:
        flight = self._flight(pages, owner)
        rooms = self._rooms(flight)
        staged = {key: self._staged[key] for key, _ in rooms if key in self._staged}
        self._lanes.read(lambda: _read(self._stack, rooms, staged), lambda read: self._land(flight, read))

    # -- landing --------------------------------------------------------------------------------------------------

    def _land(self, flight: _Flight, read: Landed | None) -> None:
        flight.owner.taking -= len(flight.blocks)
        tiers: Mapping[bytes, Tier] = read.tiers if read is not None else {}
        late: Mapping[bytes, Future[Any]] = read.late if read is not None else {}
        waiters = [waiter for waiter in flight.waiters if waiter.waiting & flight.blocks.keys()]
        wanted = [page for page in flight.pages if page.key in tiers and self._is_wanted(flight, page, tiers)]
        self._places.backend.scatter([flight.blocks[page.key] for page in wanted])
        for page in flight.pages:
            del self._flying[page.key]
        for page in wanted:
            self._arrive(flight, page, tiers[page.key])
        for key in flight.blocks.keys() - {page.key for page in wanted}:
            self._give_back(flight.blocks[key], late.get(key))
        for waiter in waiters:
            waiter.waiting -= flight.blocks.keys()
        for waiter in waiters:
            waiter.then(waiter)

    def _is_wanted(self, flight: _Flight, page: Page, tiers: Mapping[bytes, Tier]) -> bool:
        key = page.key
        if flight.streams and page.rows < PAGE_SIZE:
            return len(tiers) == len(flight.pages) and key in flight.owner.waiting
        holders = [waiter for waiter in flight.waiters if waiter.held is not None]
        return key not in flight.unwanted or any(key in waiter.waiting for waiter in holders)

    def _arrive(self, flight: _Flight, page: Page, tier: Tier) -> None:
        """A verified page: indexed, unless it has been computed meanwhile, and held by those who wait for it."""
        block, pool, owner = flight.blocks[page.key], self._places.pool, flight.owner
        if page.key in owner.waiting:
            owner.tiers[page.key] = tier
        if flight.streams and page.rows < PAGE_SIZE and owner.held is not None:
            owner.held[page.key] = block
            return
        if pool.find(page.key) is None:
            self._places.index(block, page)
        for waiter in flight.waiters:
            if page.key in waiter.waiting:
                self._hold(waiter, page.key)
        pool.release([block])

    def _hold(self, waiter: Waiter, key: bytes) -> None:
        if waiter.held is not None and key not in waiter.held:
            block = self._places.pool.acquire(key)
            assert block is not None
            waiter.held[key] = block

    def _give_back(self, block: int, late: Future[Any] | None) -> None:
        """What lies in the block is no page: nobody is to find anything of it."""
        if late is not None:
            self._late[block] = late
            self._lanes.after(late, lambda: self._let_go(block))
        else:
            self._places.backend.zero(block)
            self._places.pool.release([block])

    def _let_go(self, block: int) -> None:
        del self._late[block]
        self._give_back(block, None)


def _stream(stack: TierStack, rooms: Sequence[Wanted], stripes: Stripes, arrival: Arrival) -> Landed:
    """On a reader's thread. Pages that cannot come in stripes come whole."""
    try:
        read = stack.stream_into(rooms, stripes)
        if read is None:
            read = stack.read_into(rooms)
            if len(read.tiers) == len(rooms):
                stripes.landed(len(stripes.ends))
        return read
    finally:
        arrival.fail()  # for whoever waits for what did not come


def _read(stack: TierStack, rooms: Sequence[Wanted], staged: Mapping[bytes, Staged]) -> Landed:
    """On a reader's thread. A page that still waits to be written is taken from the copy that waits."""
    for key, room in rooms:
        if key in staged:
            staged[key].ready.wait()
            room[:] = staged[key].page
    read = stack.read_into([one for one in rooms if one[0] not in staged])
    return Landed({**read.tiers, **dict.fromkeys(staged, Tier.HOST)}, read.late)
