"""The way out of a session's sandbox, open while its step runs, and what its tools were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from runtime.config import SessionConfig
from runtime.steps.services import Services
from runtime.store import events
from runtime.store.values import Event, Owner
from sandbox import Denial, Egress, Gate, Sandbox

MAX_TOLD = 16  # events at a time; how often each was refused is in them


class WayOut:
    """Nothing at all where the session asks for no host."""

    def __init__(self, s: Services, owner: Owner, step_no: int, config: SessionConfig) -> None:
        self._services = s
        self._owner = owner
        self._step_no = step_no
        self._wanted = config.egress
        self._denied: Counter[tuple[str, int, str]] = Counter()
        self._gate: Gate | None = None

    async def open(self, sandbox: Sandbox) -> None:
        """Raises SandboxLost, StaleEpoch."""
        if self._wanted and self._gate is None:
            allowed = Egress(
                self._wanted, self._services.lookup, named="the session's egress", within=self._services.sandbox_egress
            )
            self._gate = await sandbox.open_gate(allowed, self._note)

    async def close(self) -> None:
        if self._gate is not None:
            await self._gate.close()
            self._gate = None

    async def tell(self) -> None:
        """Write down what was refused since the last time."""
        if self._denied:
            told = list(self._events())
            self._denied.clear()
            await events.write(
                self._services.db, self._owner.session_id, told, epoch=self._owner.epoch, step_no=self._step_no
            )

    def _note(self, denial: Denial) -> None:
        place = (denial.host[:253], denial.port, denial.reason[:500])
        if place in self._denied or len(self._denied) < MAX_TOLD:
            self._denied[place] += 1

    def _events(self) -> Iterator[Event]:
        for (host, port, reason), times in self._denied.items():
            yield Event("sandbox.egress_denied", {"host": host, "port": port, "reason": reason, "times": times})
