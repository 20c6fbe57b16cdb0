"""Both tiers behind one face."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from kvtier.errors import TierClosedError, TierUsageError
from kvtier.fileops import Buffer, Io, RealIo
from kvtier.host import HostArena
from kvtier.keys import KEY_BYTES, SALT_ID_MAX_BYTES
from kvtier.nvme import NvmeStore
from kvtier.values import Loaded, Receipt, Stored, Tier, TierConfig, TierCounts, TierStats


class TierStack:
    """Host and NVMe. All calls block and may come from any thread.

    A caller's mistake raises TierUsageError. Storage that fails does not raise: a page that cannot be
    kept, or does not verify, is a receipt or a miss, and a counter.
    """

    def __init__(self, config: TierConfig, *, io: Io | None = None) -> None:
        real = io or RealIo()
        self.config = config
        self._closed = False
        self._pool = ThreadPoolExecutor(config.io_threads, thread_name_prefix="kvtier")
        self._host: HostArena | None = None
        self._nvme: NvmeStore | None = None
        page_bytes, fingerprint = config.page_bytes, config.fingerprint
        try:
            if config.host_path is not None and config.host_bytes:
                self._host = HostArena(config.host_path, config.host_bytes, page_bytes, fingerprint, real, self._pool)
            if config.nvme_dir is not None and config.nvme_bytes:
                self._nvme = NvmeStore(config.nvme_dir, config.nvme_bytes, page_bytes, fingerprint, real, self._pool)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, config: TierConfig, *, io: Io | None = None) -> TierStack:
        """Adopts the host arena, indexes NVMe, sweeps what died half way.

        Raises TierConfigError (sizes, directories) and TierBusyError (another engine on the arena).
        """
        return cls(config, io=io)

    def __enter__(self) -> TierStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for I/O in flight. Pages stay where they are, for the next one to adopt. Idempotent."""
        self._closed = True
        self._pool.shutdown(wait=True)
        for tier in (self._host, self._nvme):
            if tier is not None:
                tier.close()
        self._host = self._nvme = None

    # --- asking --------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        """The nearest tier of each key, from the indexes alone; nothing is verified."""
        self._check_open()
        return [self._nearest(key) for key in keys]

    def _nearest(self, key: bytes) -> Tier | None:
        if self._host is not None and key in self._host:
            return Tier.HOST
        return Tier.NVME if self._nvme is not None and key in self._nvme else None

    def keys(self, tier: Tier) -> set[bytes]:
        """Every key that a tier has."""
        self._check_open()
        store = self._tier(tier)
        return set() if store is None else store.keys()

    def get(self, keys: Sequence[bytes]) -> list[Loaded | None]:
        """Verified copies in the order of the keys; a bad page is quarantined, then looked for below."""
        self._check_open()
        found: dict[bytes, Loaded] = {}
        for tier in Tier:
            store = self._tier(tier)
            rest = [key for key in keys if key not in found]
            if store is not None and rest:
                found |= {key: Loaded(page, tier) for key, page in store.read(rest).items()}
        return [found.get(key) for key in keys]

    # --- moving --------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, tier: Tier) -> Receipt:
        """Stores what is not there yet; a key that is there keeps its bytes.

        Payloads are `page_bytes` long and must not change until the call returns. Over budget, the least
        recently used pages go first, never those of this call.
        """
        self._check_open()
        self._check_pages(pages, epoch, salt_id)
        store = self._tier(tier)
        if store is None:
            return Receipt("rejected", 0, 0, f"there is no {tier} tier")
        distinct = list(dict(pages).items())
        return self._receipt(store.put(distinct, epoch=epoch, salt_id=salt_id), len(distinct))

    def move_to_nvme(self, keys: Sequence[bytes], *, epoch: int, salt_id: bytes) -> Receipt:
        """Host copies become durable on NVMe and are then freed; what NVMe cannot take stays on the host."""
        self._check_open()
        self._check_salt(salt_id, epoch)
        if self._nvme is None:
            return Receipt("rejected", 0, 0, f"there is no {Tier.NVME} tier")
        distinct = list(dict.fromkeys(keys))
        above = [key for key in distinct if key not in self._nvme]
        loaded = {} if self._host is None else self._host.read(above)
        pages = [(key, loaded[key]) for key in above if key in loaded]
        if distinct and len(above) == len(distinct) and not pages:
            return Receipt("missing", 0, 0, "none of these pages is in a tier")
        stored = self._nvme.put(pages, epoch=epoch, salt_id=salt_id, beside=distinct)
        durable = [key for key in distinct if key in self._nvme]
        if self._host is not None:
            self._host.delete(durable)
        detail = stored.detail or f"{len(distinct) - len(durable)} pages are in no tier"
        return self._receipt(Stored(len(durable), stored.written, detail), len(distinct))

    def _receipt(self, stored: Stored, wanted: int) -> Receipt:
        moved = stored.written * self.config.page_bytes
        if stored.present == wanted:
            return Receipt("accepted", stored.present, moved)
        return Receipt("clipped" if stored.present else "rejected", stored.present, moved, stored.detail)

    def delete(self, keys: Sequence[bytes]) -> Receipt:
        """Exactly these keys, in every tier. `pages` counts keys that went, `bytes` their copies."""
        self._check_open()
        known = {key for key in keys if self._nearest(key) is not None}
        expected = 0 if self._nvme is None else sum(key in self._nvme for key in known)
        copies = 0 if self._host is None else self._host.delete(keys)
        below = 0 if self._nvme is None else self._nvme.delete(keys)
        gone = max(len(known), below or 0) - max(0, expected - (below or 0))
        freed = (copies + (below or 0)) * self.config.page_bytes
        if below is None and expected:
            return Receipt("deferred", gone, freed, f"another process may delete from NVMe; {expected} pages stay")
        if below is not None and below < expected:
            return Receipt("clipped", gone, freed, f"{expected - below} pages could not be removed from NVMe")
        if keys and not gone:
            return Receipt("missing", 0, 0, "none of these pages is in a tier")
        return Receipt("accepted", gone, freed)

    # --- accounts ------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        self._check_open()
        return TierStats(
            host=TierCounts() if self._host is None else self._host.counts(),
            nvme=TierCounts() if self._nvme is None else self._nvme.counts(),
        )

    def check_integrity(self) -> None:
        """Raises TierIntegrityError where a tier's accounts and its storage disagree."""
        self._check_open()
        for store in (self._host, self._nvme):
            if store is not None:
                store.check_integrity()

    # --- checks --------------------------------------------------------------------------------------

    def _tier(self, tier: Tier) -> HostArena | NvmeStore | None:
        return self._host if tier is Tier.HOST else self._nvme

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

    @staticmethod
    def _check_salt(salt_id: bytes, epoch: int) -> None:
        if len(salt_id) > SALT_ID_MAX_BYTES:
            raise TierUsageError(f"salt_id has {len(salt_id)} bytes; at most {SALT_ID_MAX_BYTES} fit in a header")
        if not 0 <= epoch < 2**64:
            raise TierUsageError(f"epoch {epoch} does not fit in 64 bits")
