"""What a process knows of a shared store: what lies there, in which order it was used, and what it will not serve."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from kvtier.errors import TierIntegrityError


class Why(Enum):
    """Why a page that lies in the store is not served by this process."""

    DEAD = "dead"  # deleted here; comes back if it is put again
    BAD = "bad"  # did not verify
    UNREADABLE = "unreadable"  # another key, model or format


class SharedIndex:
    """Every method is atomic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # all that lies there; least recently used first
        self._hidden: dict[bytes, Why] = {}
        self._used_bytes = 0

    def replace(self, found: dict[bytes, int], marked: set[bytes]) -> None:
        """A new listing: what others wrote counts as least recently used; what they marked is hidden."""
        with self._lock:
            fresh = OrderedDict((key, size) for key, size in found.items() if key not in self._sizes)
            fresh.update((key, found[key]) for key in self._sizes if key in found)
            self._sizes = fresh
            self._used_bytes = sum(fresh.values())
            dead = dict.fromkeys(marked & found.keys(), Why.DEAD)
            no_good = {key: why for key, why in self._hidden.items() if key in found and why is not Why.DEAD}
            self._hidden = dead | no_good

    def sizes(self) -> dict[bytes, int]:
        with self._lock:
            return dict(self._sizes)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._sizes and key not in self._hidden for key in keys]

    def keys(self) -> set[bytes]:
        with self._lock:
            return self._sizes.keys() - self._hidden.keys()

    def why(self, key: bytes) -> Why | None:
        with self._lock:
            return self._hidden.get(key)

    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes

    def enter(self, key: bytes, size: int) -> None:
        """It lies there and is served; the most recently used."""
        with self._lock:
            self._hidden.pop(key, None)
            self._used_bytes += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._sizes.move_to_end(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    def hide(self, key: bytes, why: Why) -> None:
        with self._lock:
            self._hidden[key] = why

    def show(self, key: bytes) -> None:
        with self._lock:
            self._hidden.pop(key, None)

    def forget(self, key: bytes) -> None:
        with self._lock:
            self._used_bytes -= self._sizes.pop(key, 0)
            self._hidden.pop(key, None)

    def oldest(self, wanted_bytes: int, keep: set[bytes]) -> list[bytes]:
        """Least recently used pages that together with those already hidden make up so many bytes."""
        with self._lock:
            wanted_bytes -= sum(self._sizes.get(key, 0) for key in self._hidden)
            victims: list[bytes] = []
            for key, size in self._sizes.items():
                if wanted_bytes <= 0:
                    break
                if key not in keep and key not in self._hidden:
                    victims.append(key)
                    wanted_bytes -= size
            return victims

    def check(self) -> None:
        """The total is that of the pages."""
        with self._lock:
            if (total := sum(self._sizes.values())) != self._used_bytes:
                raise TierIntegrityError(f"shared store: {self._used_bytes} bytes are used where pages take {total}")
