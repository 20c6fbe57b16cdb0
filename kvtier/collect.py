"""Removal from a shared store in two phases: mark, wait, ask again, remove. Only the lease's holder removes.

mark     any process creates marks/KEY
grace    begins anew for every holder, when it first sees the mark on its own monotonic clock
recheck  a page that somebody claimed or still refers to is spared: mark and claim go, the page stays
remove   page, claim, mark: what an interrupted removal leaves is removed by the next one
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.config import SharedConfig
from kvtier.keys import KEY_BYTES
from kvtier.lease import Lease
from kvtier.objects import INCOMING, Objects

References: TypeAlias = Callable[[set[bytes]], set[bytes]]  # of these keys, those that somebody still refers to


@dataclass(frozen=True, slots=True)
class Collected:
    """What one round did; nothing unless this process `held` the lease. `waiting` marks are younger than the grace."""

    held: bool = False
    removed: tuple[bytes, ...] = ()
    spared: tuple[bytes, ...] = ()
    waiting: int = 0
    strays: int = 0


class Collector:
    """Not thread-safe but for `mark` and `claim`. Methods may raise OSError; what was done by then stays done."""

    def __init__(
        self, objects: Objects, config: SharedConfig, clock: Callable[[], float], references: References | None
    ) -> None:
        self._objects, self._grace_s, self._clock = objects, config.grace_s, clock
        self._references: References = references or (lambda keys: set())
        self._lease = Lease(objects, config.lease_s, clock)
        self._seen: dict[str, float] = {}  # marks and half-written blobs: when this holder first saw them

    def mark(self, key: bytes, why: bytes) -> None:
        if self._objects.create(_mark(key), [why]):
            self._seen[_mark(key)] = self._clock()

    def claim(self, key: bytes) -> bool:
        """Asks that a page stays, if it is marked; False where it is marked as damaged."""
        why = self._objects.read(_mark(key))
        if why is not None and why != b"bad":
            self._objects.create(_claim(key), [b"claimed"])
        return why != b"bad"

    def collect(self) -> Collected:
        if not self._lease.hold():
            self._seen.clear()
            return Collected()
        due, waiting = self._due()
        strays = self._remove_all(name for name in due if name.startswith(INCOMING))
        marked = {key: name for name in due if (key := key_of(name)) is not None}
        wanted = self._wanted(set(marked))
        removed, spared = [], []
        for key, name in marked.items():
            if not self._lease.held():
                break
            if key in wanted:
                spared.append(key)
            else:
                self._objects.remove(page_name(key))
                removed.append(key)
            self._objects.remove(_claim(key))
            self._objects.remove(name)
            self._seen.pop(name, None)  # a later mark of this page has a grace of its own
        return Collected(True, tuple(removed), tuple(spared), waiting, strays)

    def discard(self, name: str) -> bool:
        """Removes what nobody can refer to; False without the lease."""
        if not self._lease.hold():
            return False
        self._objects.remove(name)
        return True

    def _due(self) -> tuple[list[str], int]:
        """Marks and half-written blobs that were first seen long enough ago, and how many were not."""
        now = self._clock()
        names = [name for folder in ("marks/", INCOMING) for name, _ in self._objects.list(folder)]
        self._seen = {name: self._seen.get(name, now) for name in names}
        due = [name for name in names if now - self._seen[name] >= self._grace_s]
        return due, len(names) - len(due)

    def _remove_all(self, names: Iterator[str]) -> int:
        count = 0
        for name in names:
            if self._lease.held():
                self._objects.remove(name)
                count += 1
        return count

    def _wanted(self, keys: set[bytes]) -> set[bytes]:
        """Those that may not go. A page that did not verify goes whoever wants it."""
        if not keys:
            return set()
        claimed = {key for name, _ in self._objects.list("claims/") if (key := key_of(name)) in keys}
        wanted = {key for key in claimed if key is not None} | (self._references(keys) & keys)
        return {key for key in wanted if self._objects.read(_mark(key)) != b"bad"}

    def close(self) -> None:
        """Gives the lease back; another one takes it over in any case, later."""
        for _ in range(2):  # one failure should not cost the next holder the whole wait
            with contextlib.suppress(OSError):
                self._lease.release()
                return


def page_name(key: bytes) -> str:
    """Fan-out by the key's last two digits."""
    text = key.hex()
    return f"pages/{text[-2:]}/{text}"


def _mark(key: bytes) -> str:
    return f"marks/{key.hex()}"


def _claim(key: bytes) -> str:
    return f"claims/{key.hex()}"


def key_of(name: str) -> bytes | None:
    """The key that a blob's name ends in, or None where it is nobody's."""
    folder, _, last = name.rpartition("/")
    try:
        key = bytes.fromhex(last)
    except ValueError:
        return None
    return key if folder and len(key) == KEY_BYTES else None
