"""One medium per kind of store, each of which can be opened again and harmed: what the contract suite runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvtier import (
    CodecConfig,
    Compression,
    DomainKey,
    MemoryObjects,
    MemoryStore,
    Objects,
    PageStore,
    S3Place,
    SharedConfig,
)
from kvtier.build import open_objects
from kvtier.codec import Codec, PageForm
from kvtier.host import HostArena
from kvtier.nvme import NvmeStore
from kvtier.reads import Readers, Threads
from kvtier.segment import segment_bytes
from kvtier.segments import footprint
from kvtier.shared import SharedStore
from tests.kvtier.support import FINGERPRINT, PAGE, NoSync, flip_in_payload, host_budget, payload_of


class Ring:
    """Keys by sharing domain and id; the last one given to a domain is current."""

    def __init__(self, *ids: bytes) -> None:
        self.keys = {one: DomainKey(one, one.ljust(32, b"-")) for one in ids}

    def current(self, salt_id: bytes) -> DomainKey | None:
        return next(reversed(self.keys.values()), None)

    def find(self, salt_id: bytes, key_id: bytes) -> DomainKey | None:
        return self.keys.get(key_id)


CODECS: dict[str, CodecConfig] = {
    "plain": CodecConfig(),
    "zlib": CodecConfig(Compression.ZLIB),
    "zstd": CodecConfig(Compression.ZSTD),
    "encrypted": CodecConfig(keys=Ring(b"key-1")),
    "zstd-encrypted": CodecConfig(Compression.ZSTD, keys=Ring(b"key-1")),
}


class Medium:
    """Where a store's pages lie. `room(pages)` is a budget for that many puts of one page."""

    def __init__(self, kind: str, base: Path, new_bucket: Callable[[], S3Place], budget_pages: int = 20) -> None:
        self.kind, _, codec = kind.partition("/")
        self.base, self.io = base, NoSync()
        self.form = PageForm(PAGE, FINGERPRINT, Codec(CODECS[codec or "plain"], PAGE))
        self.budget_bytes = self.room(budget_pages)
        self._fake = MemoryStore(PAGE, self.budget_bytes)
        self._place: Path | S3Place | Objects = base / "shared"
        if self.kind == "memory":
            self._place = MemoryObjects()
        elif self.kind == "s3":
            self._place = new_bucket()

    def room(self, pages: int) -> int:
        stored = self.form.codec.most_stored_bytes
        if self.kind == "fake":
            return pages * PAGE
        if self.kind == "host":
            return host_budget(pages)
        return pages * (footprint(1, stored) if self.kind == "nvme" else segment_bytes(1, stored))

    @property
    def config(self) -> SharedConfig:
        return SharedConfig(self._place, self.budget_bytes, grace_s=0, refresh_s=0)

    def objects(self) -> Objects:
        return open_objects(self.config, self.io)

    @contextmanager
    def open(self) -> Iterator[PageStore]:
        pool, readers = ThreadPoolExecutor(2), Readers(2, 30.0, "test")
        store: PageStore
        if self.kind == "fake":
            store = self._fake
        elif self.kind == "host":
            store = HostArena(self.base / "arena", self.budget_bytes, PAGE, FINGERPRINT, self.io, pool)
        elif self.kind == "nvme":
            store = NvmeStore(self.base / "nvme", self.budget_bytes, self.form, self.io, Threads(readers, pool))
        else:
            store = SharedStore(self.objects(), self.config, self.form, Threads(readers, pool))
        try:
            yield store
        finally:
            readers.close()
            pool.shutdown()
            store.close()

    def harm(self) -> int:
        """Flips one bit in every slot, file or blob that holds a page; how many there were."""
        if self.kind == "host":
            arena, raw = self.base / "arena", (self.base / "arena").read_bytes()
            held = [number for number in range(20) if payload_of(number) in raw]
            for number in held:
                flip_in_payload(arena, number)
            return len(held)
        if self.kind in ("memory", "s3"):
            objects = self.objects()
            names = sorted(name for name, _ in objects.list("pages/"))
            for place, name in enumerate(names):
                raw = objects.read(name)
                assert raw is not None
                objects.remove(name)
                objects.create(name, [_flipped(bytes(raw), place)])
            objects.close()
            return len(names)
        files = sorted(
            path for path in self.base.rglob("*") if path.suffix == ".seg" or path.parts[-3:-2] == ("pages",)
        )
        for place, path in enumerate(files):
            path.write_bytes(_flipped(path.read_bytes(), place))
        return len(files)


def _flipped(raw: bytes, place: int) -> bytes:
    at = (4096 + 37 * place) % len(raw)
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


KINDS = [
    "fake",
    "host",
    *(f"nvme/{codec}" for codec in CODECS),
    "memory/plain",
    "memory/zstd-encrypted",
    *(f"directory/{codec}" for codec in CODECS),
    "s3/plain",
    "s3/zstd-encrypted",
]
