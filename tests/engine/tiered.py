"""A harness over tiers of one's own choice, for tests of what an engine makes of them."""

from __future__ import annotations

import queue
from collections.abc import Callable

from engine.core import EngineCore
from engine.intents import Intents
from engine.keyring import SaltKeys
from engine.lanes import Lanes
from engine.pages import PagePool
from engine.reports import Reports
from engine.request import Limits
from engine.scheduler import Scheduler
from engine.store import KvStore
from kvtier import Io, TierConfig, TierStack
from tests.engine.fakes import EOS, FINGERPRINT, PAGE_BYTES, PAGE_SIZE, VOCAB, FakeBackend, Harness


class Tiered(Harness):
    """As `Harness`, with its tiers and its keys given."""

    def __init__(
        self, config: TierConfig, *, io: Io | None = None, blocks: int = 32, keys: SaltKeys | None = None
    ) -> None:
        self.backend = FakeBackend(blocks)
        self.stack = TierStack.open(config, io=io)
        inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.lanes = Lanes(inbox.put)
        pool = PagePool(blocks)
        self.store = KvStore(self.backend, pool, self.stack, self.lanes, FINGERPRINT, PAGE_BYTES, keys)
        limits = Limits(context=4096, vocab=VOCAB, pool_tokens=blocks * PAGE_SIZE)
        self.core = EngineCore(self.backend, self.store, Scheduler(pool), limits, (EOS,), inbox)
        self.intents = Intents(self.core)
        self.reports = Reports(self.core, self.intents.keeper)
        self._names = iter(range(1 << 30))
        self.core.start()
