"""An engine core without threads: a test decides when each step is taken and when each transfer lands."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.backends.face import Backend, Logits
from engine.core import EngineCore
from engine.errors import EngineError
from engine.intents import Intents
from engine.kvcall import parse_kv
from engine.live import Guides
from engine.pages import PagePool
from engine.request import GenerateSpec, Limits
from engine.sampler import sample
from engine.sampling import Sampling
from engine.scheduler import Budget, Scheduler
from engine.speculator import Speculator
from engine.store import KvStore
from kvtier import TierStack

Then = Callable[[Any], None]


class ManualLanes:
    """As engine.lanes.Lanes, but a task runs when the test says so: writes in order, reads in any order."""

    def __init__(self) -> None:
        self.failures = self.overdue_writes = 0
        self.writes: list[tuple[Callable[[], Any], Then]] = []
        self.reads: list[tuple[Callable[[], Any], Then]] = []
        self.ends: list[tuple[Future[Any], Callable[[], object]]] = []

    def write(self, task: Callable[[], Any], then: Then, *, shared: bool = False) -> None:
        self.writes.append((task, then))

    def overdue(self, now: float) -> float | None:
        """Nothing is late before the test says so."""
        return None

    def read(self, task: Callable[[], Any], then: Then) -> None:
        self.reads.append((task, then))

    def after(self, end: Future[Any], then: Callable[[], object]) -> None:
        self.ends.append((end, then))

    def let_go(self) -> None:
        """What waited for a future that is done has its turn."""
        ready = [one for one in self.ends if one[0].done()]
        self.ends = [one for one in self.ends if one not in ready]
        for _, then in ready:
            then()

    @property
    def idle(self) -> bool:
        """Nothing starts before the test says so."""
        return False

    def close(self) -> None:
        pass

    def land_write(self) -> None:
        task, then = self.writes.pop(0)
        then(task())

    def land_read(self, which: int, lost: bool = False) -> None:
        """`lost`: the transfer fails, and says so as a failing lane does."""
        task, then = self.reads.pop(which % len(self.reads))
        then(None if lost else task())


class StreamLanes(ManualLanes):
    """Reads run at once, on a thread of their own; what they bring is told when the test says so."""

    @property
    def idle(self) -> bool:
        return not self.reads

    def read(self, task: Callable[[], Any], then: Then) -> None:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(task()))
        thread.start()

        def join() -> Any:
            thread.join()
            return results[0]

        self.reads.append((join, then))

    def land_read(self, which: int, lost: bool = False) -> None:
        task, then = self.reads.pop(which % len(self.reads))
        result = task()
        then(None if lost else result)


@dataclass
class Told:
    """What one generation has said so far."""

    request_id: str
    session: str
    prompt: tuple[int, ...]
    sampling: Sampling
    count: int
    tokens: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    reason: str | None = None
    end: dict[str, Any] = field(default_factory=dict)

    def sink(self, frame: dict[str, Any]) -> None:
        self.kinds.append(frame["type"])
        if frame["type"] == "tokens":
            assert self.reason is None
            self.tokens += frame["ids"]
        elif frame["type"] == "done":
            assert self.reason is None
            self.reason, self.end = frame["finish_reason"], frame


class Stepped:
    """One core over a backend. `turn` checks the books after every step."""

    def __init__(
        self,
        backend: Backend,
        blocks: int,
        stack: TierStack | None,
        *,
        page_bytes: int,
        vocab: int,
        context: int,
        budget: Budget,
        lanes: ManualLanes | None = None,
        tick_s: float = 0.0,
        speculator: Speculator | None = None,
    ) -> None:
        """`tick_s` passes whenever the engine looks at the clock."""
        self.lanes = lanes or ManualLanes()
        self.stack = stack
        self.now_s = 1.0  # 0 means that something has not happened
        self.store = KvStore(backend, PagePool(blocks), stack, self.lanes, b"f" * 32, page_bytes)  # type: ignore[arg-type]
        inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        limits = Limits(context=context, vocab=vocab, pool_tokens=blocks * 16)
        scheduler = Scheduler(self.store.pool, budget)
        self.core = EngineCore(
            backend, self.store, scheduler, limits, (), inbox, clock=self._tick, speculator=speculator
        )
        self._tick_s = tick_s
        self.intents = Intents(self.core)
        self.told: list[Told] = []

    def _tick(self) -> float:
        self.now_s += self._tick_s
        return self.now_s

    def submit(
        self,
        session: str,
        prompt: Sequence[int],
        count: int,
        seed: int,
        *,
        known: int = 0,
        salt: bytes = b"",
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> Told:
        sampling = sampling or Sampling(temperature=0.8, seed=seed)
        told = Told(f"q{len(self.told)}", session, tuple(prompt), sampling, count)
        spec = GenerateSpec(
            told.request_id, session, 0, told.prompt, count, sampling=sampling, known_tokens=known, salt=salt, **fields
        )
        self.core.submit(spec, Guides(), told.sink)
        self.told.append(told)
        return told

    def kv(self, intent: str, session: str, **fields: Any) -> list[dict[str, Any]]:
        """The receipts, which may come later."""
        receipts: list[dict[str, Any]] = []
        try:
            call = parse_kv({"intent": intent, "session": session, "wait": True, **fields})
            self.intents.handle(call, receipts.append)
        except EngineError as error:
            receipts.append({"status": "error", "detail": str(error)})
        return receipts

    def turn(self) -> None:
        self.core.turn()
        self.core.check_integrity()

    def round(self) -> None:
        """A turn, and one transfer of each kind lands."""
        self.turn()
        if self.lanes.reads:
            self.lanes.land_read(0)
        if self.lanes.writes:
            self.lanes.land_write()

    def settle(self, most: int = 5000) -> None:
        """Turn and let transfers land until nothing is left to do."""
        for _ in range(most):
            if not self.core.scheduler.requests() and not self.lanes.writes and not self.lanes.reads:
                copies = self.store.copies
                if copies is None or not copies.ready:
                    return
            self.round()
        raise AssertionError("the engine does not come to rest")


class LogitsLog:
    """Digests of the logits that each (seed, position) was sampled from. Two runs that differ in a bit fail at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[int, int], str] = {}
        patch.setattr("engine.drawing.sample", self._sample)

    def _sample(self, logits: Logits, sampling: Sampling, position: int, *rest: Any) -> int:
        digest = hashlib.sha256(logits.tobytes()).hexdigest()
        known = self.seen.setdefault((sampling.seed, position), digest)
        assert known == digest, f"the logits of seed {sampling.seed} at position {position} differ between runs"
        return sample(logits, sampling, position, *rest)
