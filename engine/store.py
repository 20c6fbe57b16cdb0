"""The device pool and the tiers below it: pages in, pages out, and what a session owns. Runs on the compute thread.

Copies out are snapshots taken between steps, a few pages at a time, so that no step waits for a tier, no page is
copied before it is filled, and a block can be reused while its copy is still on the way.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.backends.face import Backend
from engine.backends.moves import Copied
from engine.copies import Copies
from engine.facts import PAGE_SIZE
from engine.keyring import SaltKeys
from engine.lanes import Lanes
from engine.pages import PagePool, Taken
from engine.request import Request
from engine.restore import leading
from engine.sessions import SessionKv, Sessions
from engine.transfers import Page, Transfers
from kvtier import Receipt, Tier, TierStack, next_key, root_key


@dataclass
class Counters:
    """Since the engine started; pages unless the name says otherwise."""

    prefix_hit_tokens: int = 0
    restored_host_tokens: int = 0
    restored_nvme_tokens: int = 0
    restored_shared_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    evicted_clean: int = 0
    evicted_dirty: int = 0
    lost: int = 0
    unwanted: int = 0
    prefetched: int = 0
    prefetched_unused: int = 0
    restore_timeouts: int = 0
    pins_broken: int = 0
    preemptions: int = 0
    swapped_pages: int = 0
    copied_on_write: int = 0
    written_behind: int = 0  # pages of running requests that the host tier has got while they decoded
    ran_ahead: int = 0  # steps over pages that were still coming, and came
    thrown_away: int = 0  # such steps whose pages did not come


@dataclass(frozen=True)
class Waste:
    """Tokens that the held pages have room for, and tokens in them (systems: paged allocation)."""

    allocated_tokens: int
    used_tokens: int


class KvStore:
    """Pool, sessions and tiers together. Not thread-safe; `pump` is called between steps."""

    def __init__(
        self,
        backend: Backend,
        pool: PagePool,
        stack: TierStack | None,
        lanes: Lanes,
        fingerprint: bytes,
        page_bytes: int,
        keys: SaltKeys | None = None,
    ) -> None:
        self.backend = backend
        self.pool = pool
        self.stack = stack
        self.lanes = lanes
        self.page_bytes = page_bytes
        self.sessions = Sessions()
        self.counters = Counters()
        self.copies = None if stack is None else Copies(pool, stack, lanes, page_bytes, self._gather)
        self.transfers: Transfers | None = None
        if stack is not None and self.copies is not None:
            self.transfers = Transfers(stack, self.copies.staged, lanes, self)
        self.unwanted: set[bytes] = set()  # not worth writing when the device gives them up
        self._prefetched: set[bytes] = set()  # brought ahead of a request that has not come yet
        self._fingerprint = fingerprint
        self._keys = keys
        self._pins: Counter[int] = Counter()  # block -> sessions that pin it
        self._rows: dict[bytes, int] = {}  # rows of partial pages on the device
        self._salt_of: dict[bytes, bytes] = {}  # of pages on the device

    # -- naming ---------------------------------------------------------------------------------------------------

    def root(self, salt: bytes) -> bytes:
        """The parent of a tenant's first page. A llama has one group and one shard."""
        if self._keys is not None and self._keys.learn(salt_id(salt), salt) and self.stack is not None:
            self.stack.unlock()  # reads manifests, once for a tenant; the request that is coming looks for its pages
        return root_key(fingerprint=self._fingerprint, group=0, shard=0, shards=1, salt=salt)

    def left(self, request: Request) -> int:
        """Tokens of a new request that will have to be computed, by what lies where now."""
        keys = request.known_keys()
        here = self.pool.match(keys)
        rest = keys[here:]
        below = len(leading(rest, self.transfers.lookup(rest))) if self.transfers is not None else 0
        return len(request.tokens) - (here + below) * PAGE_SIZE

    # -- pages of a running request -------------------------------------------------------------------------------

    def take(self) -> int:
        """A block for fresh contents. The page it held before is written behind if no tier has it."""
        (taken,) = self.pool.allocate(1)
        self._write_behind(taken)
        return taken.block

    def fresh(self) -> int:
        """A block for tokens to be written into."""
        block = self.take()
        self.backend.zero(block)
        return block

    def index(self, block: int, page: Page) -> None:
        """See `transfers.Places`."""
        self._bind(block, page.key, page.rows, page.salt_id, clean=True)

    def page_of(self, record: SessionKv, key: bytes) -> Page:
        """A page of a session, to be brought back."""
        before = len(record.keys) - 1  # whole pages: only the last one can be partial
        rows = len(record.tokens) - before * PAGE_SIZE if key == record.keys[-1] else PAGE_SIZE
        return Page(key, rows, record.salt_id)

    def copy(self, block: int, rows: int) -> int:
        """See `restore.PageHome`."""
        fresh = self.take()
        self.backend.copy_rows(block, fresh, rows)
        self.pool.release([block])
        return fresh

    def grow(self, request: Request, end: int) -> None:
        """Pages to write tokens up to `end` into: fresh ones zeroed, and a copy of a page that others hold too."""
        if request.writes_shared(self.pool):
            page, rows = divmod(request.computed, PAGE_SIZE)
            request.blocks[page] = self.copy(request.blocks[page], rows)
            self.counters.copied_on_write += 1
        while len(request.blocks) * PAGE_SIZE < end:
            request.blocks.append(self.fresh())

    def filled(self, request: Request, salt: bytes) -> None:
        """Index the pages that the last step completed."""
        while (len(request.keys) + 1) * PAGE_SIZE <= request.computed:
            at = len(request.keys)
            parent = request.keys[-1] if request.keys else request.root
            key = next_key(parent, request.tokens[at * PAGE_SIZE : (at + 1) * PAGE_SIZE])
            self._bind(request.blocks[at], key, PAGE_SIZE, salt_id(salt))
            request.keys.append(key)

    def retire(self, request: Request) -> None:
        """A request ended, in whatever way: its whole pages and its tail become the session's, cached on the device."""
        record = self._hand_over(request)
        if record is not None and record.pinned:
            self.unpin(record)
            self.pin(record, self.pool.total)

    def discard(self, request: Request) -> None:
        """Give a request's pages back and forget them, wherever they are."""
        self.delete(request.keys)
        self.pool.release(request.blocks)
        request.blocks, request.keys = [], []

    def swap_out(self, request: Request) -> int:
        """Take a request's pages away: they go to the host tier in the background, and stay cached on the device until
        somebody needs their place. Returns how many."""
        record = self._hand_over(request)
        request.keys, request.computed, request.claimed_pages, request.clean_pages = [], 0, 0, 0
        if record is None:
            return 0
        if self.copies is not None:
            epoch, salt, name = request.spec.epoch, record.salt_id, record.name
            self.copies.add(record.keys, self._next_tier, epoch=epoch, salt_id=salt, session=name, then=lambda *_: None)
        return len(record.keys)

    def waste(self, requests: Iterable[Request]) -> Waste:
        """Rows of the pages that requests hold, and how many of them carry a token; a shared page counts once."""
        used: dict[int, int] = {}
        for request in requests:
            for page, block in enumerate(request.blocks):
                rows = max(0, min(PAGE_SIZE, request.computed - page * PAGE_SIZE))  # 0: of drafts that did not stand
                used[block] = max(used.get(block, 0), rows)
        return Waste(len(used) * PAGE_SIZE, sum(used.values()))

    def _hand_over(self, request: Request) -> SessionKv | None:
        """Give the request's pages to its session. None if it has none."""
        salt = request.spec.salt
        self.filled(request, salt)
        keys = list(request.keys)
        for block, key in zip(request.blocks, keys, strict=False):
            self._bind(block, key, PAGE_SIZE, salt_id(salt))  # the drop of another session may have taken it out
        rows = request.computed % PAGE_SIZE
        if rows:
            parent = keys[-1] if keys else request.root
            tail = next_key(parent, request.tokens[request.computed - rows : request.computed])
            self._bind(request.blocks[len(keys)], tail, rows, salt_id(salt))
            keys.append(tail)
        self.pool.release(request.blocks)
        request.blocks = []
        if not keys:
            return None
        record = self.sessions.open(request.spec.session, salt_id(salt), request.root)
        self.delete(self.sessions.update(record, tuple(request.tokens[: request.computed]), keys))
        return record

    def prefetched(self, keys: Iterable[bytes]) -> None:
        """These pages were brought for a request that is expected."""
        fresh = set(keys) - self._prefetched
        self.counters.prefetched += len(fresh)
        self._prefetched |= fresh

    def used(self, keys: Iterable[bytes]) -> None:
        """A request has these pages: whatever was brought for it was of use."""
        self._prefetched.difference_update(keys)

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, record: SessionKv, room: int, only: Sequence[bytes] | None = None) -> int:
        """Hold pages of the session on the device, at most `room` of them. Returns how many are held. `only`: these,
        instead of all that it wants pinned."""
        record.pinned = True
        held = set(record.pinned_blocks)
        for key in record.pinned_keys if only is None else only:
            block = self.pool.find(key)
            if block is None or block in held or len(record.pinned_blocks) >= room:
                continue
            self.pool.acquire(key)
            record.pinned_blocks.append(block)
            self._pins[block] += 1
        return len(record.pinned_blocks)

    def unpin(self, record: SessionKv) -> int:
        """Give the held pages back; they stay cached. Returns how many were held."""
        count = len(record.pinned_blocks)
        self.pool.release(record.pinned_blocks)
        self._pins.subtract(record.pinned_blocks)
        self._pins = +self._pins
        record.pinned_blocks = []
        return count

    def unpin_of(self, session: str) -> None:
        """End a session's pin, if it has one."""
        record = self.sessions.get(session)
        if record is not None:
            record.pinned = False
            self.unpin(record)

    @property
    def pinned_pages(self) -> int:
        """Distinct pages; one that two sessions pin counts once."""
        return len(self._pins)

    def break_pins(self, pages: int) -> None:
        """Take pins away, oldest session first, until `pages` pages are free of them. Visible in the counters."""
        most = max(0, self.pinned_pages - pages)
        for record in self.sessions.all():
            if self.pinned_pages <= most:
                return
            if record.pinned_blocks:
                record.pinned = False
                self.counters.pins_broken += self.unpin(record)

    # -- eviction -------------------------------------------------------------------------------------------------

    def _write_behind(self, taken: Taken) -> None:
        if taken.evicted is None:
            return
        key = taken.evicted
        if key in self._prefetched:
            self._prefetched.discard(key)
            self.counters.prefetched_unused += 1
        rows, salt = self._rows.pop(key, PAGE_SIZE), self._salt_of.pop(key, b"")
        if taken.clean and self._is_below(key):
            self.counters.evicted_clean += 1
            return
        self.counters.evicted_dirty += 1
        if key in self.unwanted:
            self.counters.unwanted += 1
            return
        if self.copies is None or not self.sessions.held(key) or self.copies.full:
            self.counters.lost += 1
            return
        copied = self.backend.gather([(taken.block, rows)])
        self.copies.send([key], copied, self._next_tier, 0, salt, lambda present, _: self._count_lost(1 - present))

    def _is_below(self, key: bytes) -> bool:
        """Whether a tier has this page now: it may have given up what it had to make room."""
        return self.stack is not None and self.stack.lookup([key])[0] is not None

    @property
    def _next_tier(self) -> Tier:
        """Where pages go that the device gives up: the nearest tier there is."""
        assert self.stack is not None
        config = self.stack.config
        if config.host_path is not None and config.host_bytes:
            return Tier.HOST
        return Tier.NVME if config.nvme_dir is not None and config.nvme_bytes else Tier.SHARED

    def _count_lost(self, pages: int) -> None:
        self.counters.lost += pages

    def _gather(self, pages: Sequence[tuple[int, bytes]]) -> Copied:
        return self.backend.gather([(block, self._rows.get(key, PAGE_SIZE)) for block, key in pages])

    # -- the end of pages -----------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[bytes], then: Callable[[Receipt | None], None] | None = None) -> None:
        """Exactly these pages, on the device (unless a running request holds them) and in every tier."""
        for key in keys:
            self.forget(key)
        if keys and self.stack is not None:
            self.delete_below(keys, then or (lambda _: None))
        elif then is not None:
            then(None)

    def delete_below(self, keys: Sequence[bytes], then: Callable[[Receipt | None], None]) -> None:
        """Exactly these pages, in every tier. A shared store that does not answer holds up nothing else; None where
        some tier did not do it."""
        stack, doomed = self.stack, list(keys)
        assert stack is not None
        here = [tier for tier in Tier if tier is not Tier.SHARED]

        def near_done(near: Receipt | None) -> None:
            if stack.config.shared is None:
                then(near)
                return
            self.lanes.write(
                lambda: stack.delete(doomed, (Tier.SHARED,)), lambda far: then(_both(near, far)), shared=True
            )

        self.lanes.write(lambda: stack.delete(doomed, here), near_done)

    def forget(self, key: bytes) -> bool:
        """Take a page out of the device's index. Running requests that hold its block are not disturbed, nor are those
        who wait for it to come."""
        if self.transfers is not None:
            self.transfers.forget(key)
        self._rows.pop(key, None)
        self._salt_of.pop(key, None)
        self.unwanted.discard(key)
        self._prefetched.discard(key)
        return self.pool.forget(key)

    def _bind(self, block: int, key: bytes, rows: int, salt_name: bytes, clean: bool = False) -> None:
        former = self.pool.key(block)
        if former is not None and former != key:
            self._rows.pop(former, None)
            self._salt_of.pop(former, None)
        if self.pool.bind(block, key, clean=clean):
            self._salt_of[key] = salt_name
            if rows < PAGE_SIZE:
                self._rows[key] = rows


def salt_id(salt: bytes) -> bytes:
    """16 bytes that name a salt without telling it."""
    return hashlib.sha256(b"tenuto.salt\0" + salt).digest()[:16]


def _both(near: Receipt | None, far: Receipt | None) -> Receipt | None:
    """What two deletions of the same pages come to."""
    if near is None or far is None:
        return None
    order = ("deferred", "clipped", "rejected", "accepted", "missing")  # what is left to do, first
    worse = min((near, far), key=lambda receipt: order.index(receipt.status))
    return Receipt(worse.status, max(near.pages, far.pages), near.bytes + far.bytes, worse.detail)
