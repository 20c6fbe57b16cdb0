"""Tenants share the engine: whoever was served least goes first.

Start-time fair queueing over tokens (Goyal, Vin and Cheng 1996, section 2): a tenant that comes back from idleness
starts at the least service among those present, so that idle time cannot be saved up.
"""

from __future__ import annotations


class Fairness:
    def __init__(self) -> None:
        self._served: dict[bytes, int] = {}  # tenant -> tokens, of those present and of those ahead of the floor
        self._present: dict[bytes, int] = {}  # tenant -> requests

    def served(self, tenant: bytes) -> int:
        return self._served.get(tenant, 0)

    def enter(self, tenant: bytes) -> None:
        """One more request of this tenant."""
        floor = self._floor()
        if tenant not in self._present:
            self._served[tenant] = max(self.served(tenant), floor)
        self._present[tenant] = self._present.get(tenant, 0) + 1

    def leave(self, tenant: bytes) -> None:
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        floor = self._floor()
        self._served = {t: n for t, n in self._served.items() if t in self._present or n > floor}

    def serve(self, tenant: bytes, tokens: int) -> None:
        self._served[tenant] = self.served(tenant) + tokens

    def _floor(self) -> int:
        """The least service of a tenant that is present; with none present, the past counts for nothing."""
        if not self._present:
            return max(self._served.values(), default=0)
        return min(self.served(tenant) for tenant in self._present)
