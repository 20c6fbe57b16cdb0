"""Who may remove from a shared store: a lease kept in the store itself, with nothing but create-only blobs.

    lease/0000000000000007   content: the holder's name, empty once it gave the lease back

The holder is whoever created the highest number. It renews by creating the next; another one takes over by
creating the next after it saw the same number for `ttl_s` on its own monotonic clock. Of two that try, one
creates it. No clock is compared with another machine's.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from kvtier.objects import Objects

_FOLDER = "lease/"


class Lease:
    """Thread-safe. Methods may raise OSError; then the lease counts as not held."""

    def __init__(self, objects: Objects, ttl_s: float, clock: Callable[[], float]) -> None:
        self._objects, self._ttl_s, self._clock = objects, ttl_s, clock
        self._owner = secrets.token_hex(16).encode()
        self._lock = threading.Lock()
        self._valid_until = float("-inf")
        self._seen: tuple[int, float] = (0, 0.0)  # the highest number, and when it was first seen

    def held(self) -> bool:
        """Whether nobody else can hold it now. Asks nobody."""
        return self._clock() < self._valid_until

    def hold(self) -> bool:
        """Takes or renews it, where that is possible."""
        with self._lock:
            # Half of the time is left for whatever is done under the lease.
            if self._clock() < self._valid_until - self._ttl_s / 2:
                return True
            self._valid_until = float("-inf")
            begun = self._clock()
            number, owner = self._highest()
            if not self._may_follow(number, owner, begun):
                return False
            if not self._objects.create(_name(number + 1), [self._owner]):
                return False
            # A number that others have passed and tidied away can be created again, but is not the highest.
            numbers = self._numbers()
            if max(numbers, default=0) != number + 1:
                return False
            self._valid_until = begun + self._ttl_s
            for old in numbers:
                if old <= number:
                    self._objects.remove(_name(old))
            return True

    def _numbers(self) -> list[int]:
        names = (name.removeprefix(_FOLDER) for name, _ in self._objects.list(_FOLDER))
        return [int(name) for name in names if name.isdecimal()]

    def _highest(self) -> tuple[int, bytes]:
        number = max(self._numbers(), default=0)
        content = self._objects.read(_name(number)) if number else b""
        # None: it was renewed and tidied up between the two requests, so somebody is alive.
        return number, b"renewed" if content is None else bytes(content)

    def _may_follow(self, number: int, owner: bytes, now: float) -> bool:
        if owner in (b"", self._owner):
            return True
        if self._seen[0] != number:
            self._seen = (number, now)
        return now - self._seen[1] >= self._ttl_s

    def release(self) -> None:
        """Gives it back, so that the next one need not wait."""
        with self._lock:
            self._valid_until = float("-inf")
            # Also one that was taken, but never known to be held because a request failed half way.
            number, owner = self._highest()
            if owner == self._owner:
                self._objects.create(_name(number + 1), [b""])


def _name(number: int) -> str:
    return f"{_FOLDER}{number:016d}"
