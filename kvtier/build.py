"""From a configuration to stores: which tiers there are, in which order, and the threads that serve them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.codec import Codec, PageForm
from kvtier.collect import References
from kvtier.config import S3Place, SharedConfig, TierConfig
from kvtier.fileops import Io
from kvtier.host import HostArena
from kvtier.nvme import NvmeStore
from kvtier.objects import DirectoryObjects, Objects
from kvtier.reads import Readers, Threads
from kvtier.shared import SharedStore
from kvtier.store import PageStore
from kvtier.values import Tier

_SHARED_THREADS = 8  # requests to a store wait for the network, not for this machine


@dataclass
class Parts:
    """Stores from the nearest to the farthest. `closers` end the threads, before the stores are closed."""

    stores: dict[Tier, PageStore] = field(default_factory=dict)
    host: HostArena | None = None
    nvme: NvmeStore | None = None
    shared: SharedStore | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Waits for what is in flight. Idempotent."""
        for close in (*self.closers, *(store.close for store in self.stores.values())):
            close()
        self.closers.clear()
        self.stores.clear()
        self.host = self.nvme = self.shared = None

    def pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        made = ThreadPoolExecutor(threads, thread_name_prefix=f"kvtier-{name}")
        self.closers.append(made.shutdown)
        return made

    def readers(self, threads: int, deadline_s: float, name: str) -> Readers:
        made = Readers(threads, deadline_s, name)
        self.closers.append(made.close)
        return made


def open_parts(config: TierConfig, io: Io, references: References | None) -> Parts:
    """All or none: what was opened is closed again when a later one cannot be."""
    parts = Parts()
    try:
        _open_all(config, io, references, parts)
    except BaseException:
        parts.close()
        raise
    return parts


def _open_all(config: TierConfig, io: Io, references: References | None, parts: Parts) -> None:
    form = PageForm(config.page_bytes, config.fingerprint, Codec(config.codec, config.page_bytes))
    pool = parts.pool(config.io_threads, "copy")
    if config.host_path is not None and config.host_bytes:
        parts.host = HostArena(config.host_path, config.host_bytes, config.page_bytes, config.fingerprint, io, pool)
        parts.stores[Tier.HOST] = parts.host
    if config.nvme_dir is not None and config.nvme_bytes:
        threads = Threads(parts.readers(config.read_threads, config.read_deadline_s, "nvme"), pool)
        parts.nvme = NvmeStore(config.nvme_dir, config.nvme_bytes, form, io, threads, config.direct)
        parts.stores[Tier.NVME] = parts.nvme
    if config.shared is not None and config.shared.budget_bytes:
        readers = parts.readers(_SHARED_THREADS, config.read_deadline_s, "shared")
        threads = Threads(readers, parts.pool(_SHARED_THREADS, "share"))
        objects = open_objects(config.shared, io)
        parts.shared = SharedStore(objects, config.shared, form, threads, references)
        parts.stores[Tier.SHARED] = parts.shared


def open_objects(config: SharedConfig, io: Io) -> Objects:
    """What a shared store is built on. TierConfigError where it cannot be had."""
    place = config.place
    if isinstance(place, Path):
        return DirectoryObjects(place, io)
    if isinstance(place, S3Place):
        from kvtier.s3 import S3Objects

        return S3Objects(place)
    return place
