"""The tiers behind one face."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvtier.audit import Audit, audit_parts
from kvtier.build import open_parts
from kvtier.collect import Collected, References
from kvtier.config import TierConfig
from kvtier.counts import TierCounts
from kvtier.errors import TierClosedError, TierUsageError
from kvtier.fileops import Buffer, Io, RealIo
from kvtier.keys import KEY_BYTES, SALT_ID_MAX_BYTES
from kvtier.speed import ReadSpeed
from kvtier.store import PageStore
from kvtier.stripes import Stripes
from kvtier.values import Landed, Loaded, Receipt, Stored, Tier, TierStats, Wanted


class TierStack:
    """Host, NVMe and a shared store, each of them optional. All calls block and may come from any thread.

    A caller's mistake raises TierUsageError. Storage that fails does not raise: a page that cannot be
    kept, or does not verify, is a receipt or a miss, and a counter. Nothing is promoted by being read.
    """

    def __init__(self, config: TierConfig, *, io: Io | None = None, references: References | None = None) -> None:
        self.config = config
        self._closed = False
        self._parts = open_parts(config, io or RealIo(), references)
        self._stores = self._parts.stores

    @classmethod
    def open(cls, config: TierConfig, *, io: Io | None = None, references: References | None = None) -> TierStack:
        """Adopts the host arena, indexes NVMe, lists the shared store, sweeps what died half way.

        `references` tells which of some keys somebody still refers to; those are not removed from a shared store.
        Raises TierConfigError (sizes, directories, libraries) and TierBusyError (another engine on the arena).
        """
        return cls(config, io=io, references=references)

    def __enter__(self) -> TierStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for I/O in flight. Pages stay where they are, for the next one to adopt. Idempotent."""
        self._closed = True
        self._parts.close()

    # --- asking --------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        """The nearest tier of each key, from the indexes alone; nothing is read or verified."""
        self._check_open()
        nearest: list[Tier | None] = [None] * len(keys)
        for tier, store in self._stores.items():
            for place, here in enumerate(store.lookup(keys)):
                if here and nearest[place] is None:
                    nearest[place] = tier
        return nearest

    def keys(self, tier: Tier) -> set[bytes]:
        """Every key that a tier has."""
        self._check_open()
        store = self._stores.get(tier)
        return set() if store is None else store.keys()

    def get(self, keys: Sequence[bytes]) -> list[Loaded | None]:
        """Verified copies in the order of the keys; a bad page is quarantined, then looked for below."""
        self._check_open()
        found: dict[bytes, Loaded] = {}
        for tier, store in self._stores.items():
            rest = [key for key in keys if key not in found]
            if rest:
                found |= {key: Loaded(page, tier) for key, page in store.get(rest).items()}
        return [found.get(key) for key in keys]

    def read_into(self, wanted: Sequence[Wanted]) -> Landed:
        """As `get`, into the caller's memory: see `PageStore.read_into`. Keys are distinct.

        A page whose read is late is not looked for below: that memory has a writer already.
        """
        self._check_open()
        self._check_rooms(wanted)
        tiers: dict[bytes, Tier] = {}
        late: dict[bytes, Future[Any]] = {}
        for tier, store in self._stores.items():
            rest = [one for one in wanted if one[0] not in tiers and one[0] not in late]
            if rest:
                filled = store.read_into(rest)
                tiers |= dict.fromkeys(filled.keys, tier)
                late |= filled.late
        return Landed(tiers, late)

    def stream_into(self, wanted: Sequence[Wanted], stripes: Stripes) -> Landed | None:
        """As `read_into`, from NVMe alone, the first stripe of every page first. None, and nothing read, unless all of
        these pages lie there and can be read so. What fails is not looked for below."""
        self._check_open()
        self._check_rooms(wanted)
        nvme = self._parts.nvme
        filled = nvme.stream_into(wanted, stripes) if nvme is not None and wanted else None
        return None if filled is None else Landed(dict.fromkeys(filled.keys, Tier.NVME), filled.late)

    # --- moving --------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, tier: Tier) -> Receipt:
        """Stores what is not there yet; a key that is there keeps its bytes.

        Payloads are `page_bytes` long and must not change until the call returns. Over budget, the least
        recently used pages go first, never those of this call.
        """
        self._check_open()
        self._check_pages(pages, epoch, salt_id)
        store = self._stores.get(tier)
        if store is None:
            return Receipt("rejected", 0, 0, f"there is no {tier} tier")
        distinct = list(dict(pages).items())
        return self._receipt(store.put(distinct, epoch=epoch, salt_id=salt_id), len(distinct))

    def move_to_nvme(self, keys: Sequence[bytes], *, epoch: int, salt_id: bytes) -> Receipt:
        """Host copies become durable on NVMe and are then freed; what NVMe cannot take stays on the host."""
        return self.move(keys, Tier.NVME, epoch=epoch, salt_id=salt_id)

    def move(self, keys: Sequence[bytes], to: Tier, *, epoch: int, salt_id: bytes) -> Receipt:
        """As `copy`; then the copies in nearer tiers are freed, of those pages that `to` now has."""
        receipt = self.copy(keys, to, epoch=epoch, salt_id=salt_id)
        store = self._stores.get(to)
        if store is not None and receipt.pages:
            distinct = list(dict.fromkeys(keys))
            stored = [key for key, here in zip(distinct, store.lookup(distinct), strict=True) if here]
            for nearer in self._nearer(to):
                nearer.delete(stored)
        return receipt

    def copy(self, keys: Sequence[bytes], to: Tier, *, epoch: int, salt_id: bytes) -> Receipt:
        """Pages from nearer tiers are put into `to` as well. `pages` counts those that it then has."""
        self._check_open()
        self._check_salt(salt_id, epoch)
        store = self._stores.get(to)
        if store is None:
            return Receipt("rejected", 0, 0, f"there is no {to} tier")
        distinct = list(dict.fromkeys(keys))
        absent = [key for key, here in zip(distinct, store.lookup(distinct), strict=True) if not here]
        loaded: dict[bytes, Buffer] = {}
        for nearer in self._nearer(to):
            loaded |= nearer.get([key for key in absent if key not in loaded])
        if distinct and len(absent) == len(distinct) and not loaded:
            return Receipt("missing", 0, 0, "none of these pages is in a tier")
        pages = [(key, loaded[key]) for key in absent if key in loaded]
        done = store.put(pages, epoch=epoch, salt_id=salt_id, beside=distinct)
        present = sum(store.lookup(distinct))
        detail = done.detail or f"{len(distinct) - present} pages are in no tier"
        return self._receipt(Stored(present, done.written, detail), len(distinct))

    def _nearer(self, to: Tier) -> list[PageStore]:
        order = list(Tier)
        return [store for tier, store in self._stores.items() if order.index(tier) < order.index(to)]

    def _receipt(self, stored: Stored, wanted: int) -> Receipt:
        moved = stored.written * self.config.page_bytes
        if stored.present == wanted:
            return Receipt("accepted", stored.present, moved)
        return Receipt("clipped" if stored.present else "rejected", stored.present, moved, stored.detail)

    def delete(self, keys: Sequence[bytes], tiers: Collection[Tier] = tuple(Tier)) -> Receipt:
        """Exactly these keys, in every tier, or in those named. `pages` counts keys that went, `bytes` their copies.

        A shared store serves them no more, and is rid of their bytes when the holder of its lease collects.
        """
        self._check_open()
        distinct = list(dict.fromkeys(keys))
        stores = {tier: store for tier, store in self._stores.items() if tier in tiers}
        found = {tier: store.lookup(distinct) for tier, store in stores.items()}
        known = sum(any(here) for here in zip(*found.values(), strict=True))
        there = {tier: sum(here) for tier, here in found.items()}
        went = {tier: store.delete(distinct) for tier, store in stores.items()}
        stay = {tier: max(0, there[tier] - (count or 0)) for tier, count in went.items()}
        copies = [count or 0 for count in went.values()]
        gone = max([known, *copies]) - max([0, *stay.values()])
        freed = sum(copies) * self.config.page_bytes
        for tier, count in went.items():
            if count is None and there[tier]:
                detail = f"another process may delete from {tier}; {there[tier]} pages stay"
                return Receipt("deferred", gone, freed, detail)
        for tier, left in stay.items():
            if left:
                return Receipt("clipped", gone, freed, f"{left} pages could not be removed from {tier}")
        if keys and not gone:
            return Receipt("missing", 0, 0, "none of these pages is in a tier")
        return Receipt("accepted", gone, freed)

    def unlock(self) -> None:
        """The key ring has a new key: what could not be read for want of it is looked at again."""
        self._check_open()
        if self._parts.nvme is not None:
            self._parts.nvme.unlock()

    def free(self, keys: Sequence[bytes], tier: Tier) -> int:
        """These keys, in one tier; copies elsewhere stay. Returns how many went."""
        self._check_open()
        store = self._stores.get(tier)
        return 0 if store is None else store.delete(list(dict.fromkeys(keys))) or 0

    # --- the shared store ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Lists the shared store now, instead of when its last listing is too old."""
        self._check_open()
        if self._parts.shared is not None:
            self._parts.shared.refresh()

    def collect(self) -> Collected:
        """Removes from the shared store what was marked long enough ago, if this process holds the lease."""
        self._check_open()
        return Collected() if self._parts.shared is None else self._parts.shared.collect()

    def host_room(self) -> int:
        """How many pages the host tier takes without evicting any; 0 without such a tier. Waits for no I/O."""
        self._check_open()
        return 0 if self._parts.host is None else self._parts.host.room()

    # --- accounts ------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        self._check_open()
        counts = {tier: store.counts() for tier, store in self._stores.items()}
        none = TierCounts()
        return TierStats(*(counts.get(tier, none) for tier in Tier))

    def check_integrity(self) -> None:
        """Raises TierIntegrityError where a tier's accounts and its storage disagree."""
        self._check_open()
        for store in self._stores.values():
            store.check_integrity()

    def audit(self, *, repair: bool = False, every_key: bool = False) -> Audit:
        """Reads every tier anew and compares with the indexes; see `audit`. `repair` removes orphans, and where the
        key ring has `every_key` that there is, what needs another one."""
        self._check_open()
        return audit_parts(self._parts, repair, every_key)

    def measure(self, size_bytes: int = 64 * 2**20) -> ReadSpeed | None:
        """How fast NVMe reads here and now; see `NvmeStore.measure`. None without such a tier, or where it fails."""
        self._check_open()
        return None if self._parts.nvme is None else self._parts.nvme.measure(size_bytes)

    # --- checks --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError("the tiers are closed")

    def _check_pages(self, pages: Iterable[tuple[bytes, Buffer]], epoch: int, salt_id: bytes) -> None:
        self._check_salt(salt_id, epoch)
        for key, payload in pages:
            if len(key) != KEY_BYTES:
                raise TierUsageError(f"a page key has {KEY_BYTES} bytes, this one has {len(key)}")
            view = memoryview(payload)
            if not view.c_contiguous:
                raise TierUsageError("a page's payload must be contiguous; copy it first")
            size = view.nbytes
            if size != self.config.page_bytes:
                raise TierUsageError(f"a page has {self.config.page_bytes} bytes here, this one has {size}")

    def _check_rooms(self, wanted: Sequence[Wanted]) -> None:
        for _, room in wanted:
            if room.readonly or not room.c_contiguous or room.nbytes != self.config.page_bytes or room.itemsize != 1:
                size = self.config.page_bytes
                raise TierUsageError(f"a page is read into {size} contiguous bytes that can be written")

    @staticmethod
    def _check_salt(salt_id: bytes, epoch: int) -> None:
        if len(salt_id) > SALT_ID_MAX_BYTES:
            raise TierUsageError(f"salt_id has {len(salt_id)} bytes; at most {SALT_ID_MAX_BYTES} fit in a header")
        if not 0 <= epoch < 2**64:
            raise TierUsageError(f"epoch {epoch} does not fit in 64 bits")
