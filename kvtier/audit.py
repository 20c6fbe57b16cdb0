"""Every tier read anew and compared with its index: what lies there that nothing stands for, and the other way round.

A repair removes what nothing stands for and forgets what is not there. It removes from NVMe only where this process
holds the lease, and from a shared store only by the two phases, so there it may take another call after the grace.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.build import Parts
from kvtier.collect import key_of
from kvtier.host import HostArena
from kvtier.index import Held
from kvtier.nvme import NvmeStore
from kvtier.objects import INCOMING
from kvtier.runs import Bad
from kvtier.segment import runs
from kvtier.shared import SharedStore
from kvtier.slots import Slot
from kvtier.values import Tier


class Flaw(enum.StrEnum):
    """What is wrong with a place."""

    HALF = "half file"  # of a writer that died, or a blob on its way into a shared store
    ORPHAN = "orphan"  # bytes that no index entry stands for
    EMPTY = "empty entry"  # an index entry without bytes, or with those of something else
    DAMAGED = "damaged page"  # bytes that do not verify
    LOCKED = "locked"  # a segment that needs a key which is not here
    QUARANTINED = "quarantined"  # did not verify earlier, and was kept for inspection
    UNREADABLE = "unreadable"  # the medium would not tell


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` is a path or a blob's name under the tier's root, a slot, or a page of one of them."""

    tier: Tier
    flaw: Flaw
    name: str
    size_bytes: int
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """`pages` were read and verified; `size_bytes` is their payload."""

    findings: tuple[Finding, ...]
    pages: int
    size_bytes: int

    @property
    def clean(self) -> bool:
        """Whether every index stands for what is there; quarantined and locked bytes are known and counted."""
        known = (Flaw.QUARANTINED, Flaw.LOCKED)
        return all(one.flaw in known or one.repaired for one in self.findings)

    def count(self, flaw: Flaw) -> int:
        return sum(one.flaw is flaw for one in self.findings)


def audit_parts(parts: Parts, repair: bool, every_key: bool = False) -> Audit:
    """Tier by tier; each one's changes wait while it is audited. Storage that fails is a finding."""
    findings: list[Finding] = []
    read: Counter[str] = Counter()
    host = parts.stores.get(Tier.HOST)
    if isinstance(host, HostArena):
        findings += _audit_host(host, repair, read)
    if parts.nvme is not None:
        findings += _audit_nvme(parts.nvme, repair, every_key, read)
    if parts.shared is not None:
        findings += _audit_shared(parts.shared, repair, read)
    return Audit(tuple(findings), read["pages"], read["bytes"])


# --- host ------------------------------------------------------------------------------------------------


def _audit_host(store: HostArena, repair: bool, read: Counter[str]) -> Iterator[Finding]:
    with store.writer:
        indexed = store.by_slot()
        for index in range(store.slots):
            try:
                flaw = _flaw_of_slot(store, index, indexed, read)
                if flaw is not None and repair:
                    store.free_slot(index)
            except OSError:
                yield Finding(Tier.HOST, Flaw.UNREADABLE, f"slot {index}", store.page_bytes)
                continue
            if flaw is not None:
                yield Finding(Tier.HOST, flaw, f"slot {index}", store.page_bytes, repair)


def _flaw_of_slot(store: HostArena, index: int, indexed: dict[int, Slot], read: Counter[str]) -> Flaw | None:
    free, slot = store.file.look(index)
    if index not in indexed:
        return None if free else Flaw.ORPHAN
    if slot != indexed[index] or slot is None:
        return Flaw.EMPTY
    if not store.verifies(slot):
        return Flaw.DAMAGED
    _add(read, store.page_bytes)
    return None


def _add(read: Counter[str], size_bytes: int) -> None:
    read["pages"] += 1
    read["bytes"] += size_bytes


# --- NVMe ------------------------------------------------------------------------------------------------


def _audit_nvme(store: NvmeStore, repair: bool, every_key: bool, read: Counter[str]) -> list[Finding]:
    with store.writer:
        store.refresh()
        mine = repair and store.files.hold_lease()
        found = [*_entries(store, mine, read), *_locked(store, mine and every_key)]
        try:
            return found + list(_files(store, mine))
        except OSError:
            return [*found, Finding(Tier.NVME, Flaw.UNREADABLE, ".", 0)]


def _entries(store: NvmeStore, repair: bool, read: Counter[str]) -> Iterator[Finding]:
    """Index entries whose bytes are not there, or do not verify."""
    files = store.files
    for held in store.index.segments():
        sizes = files.size(files.segment_path(held.id)), files.size(files.manifest_path(held.id))
        if sizes != (held.header.segment_bytes, held.manifest_bytes):
            if repair:
                store.index.forget(held.id)  # what is left of it is now an orphan
            yield Finding(Tier.NVME, Flaw.EMPTY, f"{held.id[-2:]}/{held.id}", held.size_bytes, repair)
            continue
        yield from _pages(store, held, repair, read)


def _locked(store: NvmeStore, remove: bool) -> Iterator[Finding]:
    """Segments that nothing can be said of for want of a key. Whoever has given every key that there is may have them
    removed: nobody can ever read them."""
    for segment_id, size_bytes in store.locked().items():
        name = f"{segment_id[-2:]}/{segment_id}"
        yield Finding(Tier.NVME, Flaw.LOCKED, name, size_bytes, remove and store.remove_locked(segment_id))


def _pages(store: NvmeStore, held: Held, repair: bool, read: Counter[str]) -> Iterator[Finding]:
    """Pages that do not verify. One that needs a key that is not here does."""
    name = f"{held.id[-2:]}/{held.id}"
    bad: list[int] = []
    plan = [(held, run) for run in runs(sorted(held.live), store.runs.pages)]
    for (_, rows), pages in zip(plan, store.runs.fetch(plan), strict=True):
        if not isinstance(pages, list):  # the disk refused, or took too long
            size = sum(held.header.spans(rows)[1])
            yield Finding(Tier.NVME, Flaw.UNREADABLE, f"{name} pages {rows.start} to {rows.stop - 1}", size)
            continue
        for row, page in zip(rows, pages, strict=True):
            if page is Bad.DAMAGED:
                bad.append(row)
                yield Finding(Tier.NVME, Flaw.DAMAGED, f"{name} page {row}", held.header.rows[row][2], repair)
            else:
                _add(read, store.page_bytes)
    if bad and repair:
        store.discard(held, bad)


def _files(store: NvmeStore, repair: bool) -> Iterator[Finding]:
    """Files that no index entry stands for."""
    files = store.files
    ids = [*(held.id for held in store.index.segments()), *store.index.foreign()]
    expected = {path for one in ids for path in (files.segment_path(one), files.manifest_path(one))}
    for path in files.all_files():
        if path in expected or not files.is_dead(path):
            continue
        flaw = _flaw_of_file(store, path)
        size = files.size(path)
        yield Finding(Tier.NVME, flaw, str(path.relative_to(files.root)), size, repair and files.remove(path))


def _flaw_of_file(store: NvmeStore, path: Path) -> Flaw:
    if path.parent == store.files.quarantine.folder:
        return Flaw.QUARANTINED
    return Flaw.HALF if path.suffix == ".tmp" else Flaw.ORPHAN


# --- shared ----------------------------------------------------------------------------------------------


def _audit_shared(store: SharedStore, repair: bool, read: Counter[str]) -> list[Finding]:
    with store.writer:
        known = store.sizes()
        try:
            blobs = dict(store.objects.list(""))
        except OSError:
            return [Finding(Tier.SHARED, Flaw.UNREADABLE, ".", 0)]
        found = [*_unexpected(store, blobs, repair), *_unserved(store, known, blobs, repair, read)]
        if repair:
            store.refresh()
            store.collect()
        return found


def _unexpected(store: SharedStore, blobs: dict[str, int], repair: bool) -> Iterator[Finding]:
    """Half blobs, and pages that were marked and wait for the holder of the lease; blobs that are no page's."""
    for name, size in blobs.items():
        if name.startswith(INCOMING):
            yield Finding(Tier.SHARED, Flaw.HALF, name, size)
        elif name.startswith("pages/") and key_of(name) is None:
            yield Finding(Tier.SHARED, Flaw.ORPHAN, name, size, repair and store.discard_blob(name))


def _unserved(
    store: SharedStore, known: dict[bytes, int], blobs: dict[str, int], repair: bool, read: Counter[str]
) -> Iterator[Finding]:
    """Index entries whose blobs are not there, or do not verify. Others' new pages are no flaw."""
    sizes = {key: size for name, size in blobs.items() if (key := key_of(name)) and name.startswith("pages/")}
    for key, size in known.items():
        if sizes.get(key) != size:
            yield Finding(Tier.SHARED, Flaw.EMPTY, key.hex(), size, repair)
    served = [key for key, here in zip(sizes, store.lookup(list(sizes)), strict=True) if here]
    whole = store.get(served)
    for key in served:
        if key in whole:
            _add(read, store.page_bytes)
        else:
            yield Finding(Tier.SHARED, Flaw.DAMAGED, key.hex(), sizes[key])
