"""Bookkeeping of the device pool: free list, reference counts, prefix index, reuse of cached pages. No torch.

A block is in exactly one of three states, and the sum is conserved (`check_integrity`):

    free     no key, no reference                 contents mean nothing
    cached   key, no reference                    contents are the page of that key; reused when the pool is short
    held     one or more references               contents belong to the holders; a key may be bound already

    free ──allocate──> held ──bind──> held+key ──release──> cached ──allocate──> held (evicted)
     ^                   |                                    |  ^
     └──────release──────┘ (no key)        forget ── free <───┘  └─ acquire ─> held+key

Cached pages are reused oldest first, clean ones (a tier holds the same bytes) before dirty ones. Keys are chains over
all tokens up to the page's end, so a key names the whole prefix and two tenants' keys never meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import PageError


@dataclass(frozen=True)
class Taken:
    """A block handed out. `evicted` is the key of the page it held until now; `clean`: a tier holds that page too."""

    block: int
    evicted: bytes | None = None
    clean: bool = True


@dataclass(frozen=True)
class PoolCounts:
    total: int
    free: int
    cached_clean: int
    cached_dirty: int
    held: int


class PagePool:
    """Not thread-safe: one thread keeps the books."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise PageError(f"a pool needs at least one block, not {blocks}")
        self._free = list(range(blocks - 1, -1, -1))
        self._refs = [0] * blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._clean: set[int] = set()
        self._idle_clean: OrderedDict[int, None] = OrderedDict()
        self._idle_dirty: OrderedDict[int, None] = OrderedDict()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        return len(self._refs)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now: free and cached ones."""
        return len(self._free) + len(self._idle_clean) + len(self._idle_dirty)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        return self._key_of.get(block)

    def indexed(self) -> list[bytes]:
        """The key of every page that has one."""
        return list(self._block_of)

    def find(self, key: bytes) -> int | None:
        """The block that holds the page of this key, without touching it."""
        return self._block_of.get(key)

    def is_held(self, key: bytes) -> bool:
        """Whether somebody holds the page of this key."""
        block = self._block_of.get(key)
        return block is not None and self._refs[block] > 0

    def is_clean(self, key: bytes) -> bool:
        block = self._block_of.get(key)
        return block is not None and block in self._clean

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are here."""
        for count, key in enumerate(keys):
            if key not in self._block_of:
                return count
        return len(keys)

    def counts(self) -> PoolCounts:
        clean, dirty, free = len(self._idle_clean), len(self._idle_dirty), len(self._free)
        return PoolCounts(self.total, free, clean, dirty, self.total - free - clean - dirty)

    # -- moves ----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[Taken]:
        """Blocks with one reference each. Raises PageError, taking nothing, when fewer are available."""
        if count > self.available:
            raise PageError(f"{count} pages are wanted and {self.available} of {self.total} are available")
        return [self._take() for _ in range(count)]

    def acquire(self, key: bytes) -> int | None:
        """One more reference to the page of this key; None if it is not here."""
        block = self._block_of.get(key)
        if block is not None:
            self._idle_clean.pop(block, None)
            self._idle_dirty.pop(block, None)
            self._refs[block] += 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that somebody holds, whether it has a key or not."""
        if self._refs[block] < 1:
            raise PageError(f"block {block} is shared, but nobody holds it")
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference back per block. Raises PageError on a block that nobody holds."""
        for block in blocks:
            if self._refs[block] < 1:
                raise PageError(f"block {block} is released, but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._rest(block)

    def bind(self, block: int, key: bytes, *, clean: bool = False) -> bool:
        """Index a held block as the page of `key`, in place of its former key.

        False if another block is that page already: then this one stays without a key, and is freed with its last
        holder.
        """
        if self._refs[block] < 1:
            raise PageError(f"block {block} is bound to a key, but nobody holds it")
        other = self._block_of.get(key)
        if other is not None and other != block:
            self._unbind(block)
            return False
        if self._key_of.get(block) != key:
            self._unbind(block)
            self._key_of[block] = key
            self._block_of[key] = block
        if clean:
            self._clean.add(block)
        return True

    def mark(self, key: bytes, *, clean: bool) -> None:
        """Note whether a tier holds the same page. Nothing happens for a key that is not here."""
        block = self._block_of.get(key)
        if block is None:
            return
        idle = block in self._idle_clean or block in self._idle_dirty
        self._idle_clean.pop(block, None)
        self._idle_dirty.pop(block, None)
        (self._clean.add if clean else self._clean.discard)(block)
        if idle:
            self._rest(block)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Cached pages of these keys are the next to be reused, the first of them first."""
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is None:
                continue
            for cached in (self._idle_clean, self._idle_dirty):
                if block in cached:
                    cached.move_to_end(block, last=False)

    def forget(self, key: bytes) -> bool:
        """Take the key out of the index; an unreferenced page is freed. False if it was not here."""
        block = self._block_of.get(key)
        if block is None:
            return False
        idle = block in self._idle_clean or block in self._idle_dirty
        self._idle_clean.pop(block, None)
        self._idle_dirty.pop(block, None)
        self._unbind(block)
        if idle:
            self._free.append(block)
        return True

    def check_integrity(self) -> None:
        """Raise PageError unless free + cached + held is all, each block is in one state, and the index is one to
        one.
        """
        free, clean, dirty = set(self._free), set(self._idle_clean), set(self._idle_dirty)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        if any(refs < 0 for refs in self._refs):
            raise PageError("a block has fewer than no references")
        if len(free) != len(self._free):
            raise PageError("a block is free twice")
        if (
            len(free) + len(clean) + len(dirty) + len(held) != self.total
            or len(free | clean | dirty | held) != self.total
        ):
            raise PageError("free, cached and held blocks do not add up to the pool")
        if {b: k for k, b in self._block_of.items()} != self._key_of:
            raise PageError("the prefix index and the blocks' keys differ")
        if any(block in self._key_of for block in free) or any(block not in self._key_of for block in clean | dirty):
            raise PageError("a free block has a key, or a cached one has none")
        if not clean <= self._clean or dirty & self._clean or not self._clean <= set(self._key_of):
            raise PageError("the clean marks and the cached lists differ")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(self) -> Taken:
        if self._free:
            block = self._free.pop()
            self._refs[block] = 1
            return Taken(block)
        clean = bool(self._idle_clean)
        block, _ = (self._idle_clean if clean else self._idle_dirty).popitem(last=False)
        key = self._key_of[block]
        self._unbind(block)
        self._refs[block] = 1
        return Taken(block, key, clean)

    def _rest(self, block: int) -> None:
        if block not in self._key_of:
            self._free.append(block)
        elif block in self._clean:
            self._idle_clean[block] = None
        else:
            self._idle_dirty[block] = None

    def _unbind(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        self._clean.discard(block)
        if key is not None:
            del self._block_of[key]
