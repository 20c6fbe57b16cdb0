"""Encryption keys of sharing domains, made from their salts: whoever has the salt can find the pages, and only they can
read them."""

from __future__ import annotations

import hmac
import threading

from kvtier import DomainKey

_PURPOSE = b"tenuto.kv.encryption.v1"


class SaltKeys:
    """A `kvtier.KeyRing` of the salts that this engine has heard. Thread-safe.

    The record keeps the salts; a salt that it forgets takes the key with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, DomainKey] = {}

    def learn(self, salt_id: bytes, salt: bytes) -> bool:
        """Whether that is news. No salt is no secret: pages without one are not kept below host memory."""
        with self._lock:
            if not salt or salt_id in self._keys:
                return False
            self._keys[salt_id] = DomainKey(salt_id[:16], hmac.digest(salt, _PURPOSE, "sha256"))
            return True

    def current(self, salt_id: bytes) -> DomainKey | None:
        with self._lock:
            return self._keys.get(salt_id)

    def find(self, salt_id: bytes, key_id: bytes) -> DomainKey | None:
        key = self.current(salt_id)
        return key if key is not None and key.key_id == key_id else None
