"""The compute thread: takes commands, plans, steps the model, samples, and gives frames to whoever listens.

Everything that touches pages runs here, between steps, so nothing needs a lock. Others talk to it by `post`; it talks
to others through each request's `sink`, which must not block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.backends.face import Backend, Logits, Tile
from engine.constraint import Constraint
from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.request import GenerateSpec, Limits, Phase, Request, admit_spec
from engine.restore import Fetched, Search, adopt, fetch, missing, search
from engine.sampler import sample
from engine.scheduler import Plan, Scheduler, Work
from engine.store import KvStore, salt_id

Frame = dict[str, Any]
Sink = Callable[[Frame], None]
RESTORE_DEADLINE_S = 10.0


@dataclass
class Live:
    """A request with its listener, grammar, and clock readings in seconds."""

    request: Request
    sink: Sink
    constraint: Constraint | None
    submitted_s: float
    search: Search | None = None
    restore_until_s: float = 0.0
    running_s: float = 0.0
    first_token_s: float = 0.0


class EngineCore:
    """Owns the compute thread. `start`, then `post` and `submit` from any thread, then `stop`."""

    def __init__(
        self,
        backend: Backend,
        store: KvStore,
        scheduler: Scheduler,
        limits: Limits,
        eos: tuple[int, ...],
        inbox: queue.SimpleQueue[Callable[[], object]],
    ) -> None:
        self.store = store
        self.scheduler = scheduler
        self.limits = limits
        self.steps = 0
        self.fault: BaseException | None = None
        self.timers: list[Callable[[float], float | None]] = []  # each gives the seconds until it is next due
        self._backend = backend
        self._eos = frozenset(eos)
        self._inbox = inbox
        self._live: dict[str, Live] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Run `command` on the compute thread, between two steps."""
        self._inbox.put(command)

    def stop(self) -> None:
        """Cancel what runs and end the thread; returns when it has ended."""
        self.post(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def wait_ended(self) -> None:
        """Block until the compute thread has ended, by `stop` or by a fault."""
        self._thread.join()

    # -- commands (on the compute thread) -------------------------------------------------------------------------

    def submit(self, spec: GenerateSpec, constraint: Constraint | None, sink: Sink) -> None:
        """Queue a generation. Raises RequestError; frames go to `sink` from here on."""
        request = admit_spec(spec, self.limits)
        if self.store.sessions.fence(spec.session, spec.epoch):
            self.cancel_session(spec.session)
        if spec.request_id in self._live:
            raise RequestError("duplicate_request", f"request {spec.request_id!r} is already running")
        request.root = self.store.root(spec.salt)
        self.store.sessions.open(spec.session, salt_id(spec.salt), request.root).nvme_due_s = None
        self._live[spec.request_id] = Live(request, sink, constraint, time.monotonic())
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        """End a generation now; what was computed stays the session's. False if there is none."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._end(live, "cancelled")
        return True

    def cancel_session(self, session: str) -> int:
        """End all generations of a session. Returns how many."""
        running = [live for live in self._live.values() if live.request.spec.session == session]
        for live in running:
            self._end(live, "cancelled")
        return len(running)

    def room_pages(self) -> int:
        """Pages that neither running requests nor pins have a claim on."""
        return self.store.pool.total - self.scheduler.reserved_pages - self.store.pinned_pages

    # -- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(self._patience())
                if self._stopping:
                    return
                self._turn()
        except BaseException as error:
            self.fault = error
            raise
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        for live in [x for x in self._live.values() if x.search is not None and x.restore_until_s < now]:
            self.store.counters.restore_timeouts += 1
            self._restored(live, live.search, None)
        if self.store.copies is not None:
            self.store.copies.pump()
        plan = self.scheduler.schedule(self.store.pinned_pages)
        if plan.unpin_pages:
            self.store.break_pins(plan.unpin_pages)
        for request in plan.admit:
            self._begin(self._live[request.spec.request_id])
        if plan.work:
            self._step(plan)

    def _take_commands(self, patience_s: float | None) -> None:
        try:
            command = self._inbox.get(timeout=patience_s) if patience_s != 0 else self._inbox.get_nowait()
            while True:
                command()
                if self._stopping:
                    return
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _patience(self) -> float | None:
        """Seconds to wait for a command: none while there is work, for ever when there is nothing."""
        now = time.monotonic()
        dues = [due for due in (timer(now) for timer in self.timers) if due is not None]
        copying = self.store.copies is not None and self.store.copies.ready
        if copying or any(live.request.phase is Phase.RUNNING for live in self._live.values()):
            return 0
        if self.scheduler.waiting and not self.scheduler.admitted:
            return 0
        dues += [live.restore_until_s - now for live in self._live.values() if live.search is not None]
        return max(0.001, min(dues)) if dues else None

    # -- one request ----------------------------------------------------------------------------------------------

    def _begin(self, live: Live) -> None:
        """Find what the prompt already has; ask the tiers for the rest."""
        request, store = live.request, self.store
        found = search(request, store.pool)
        live.search = found
        stack = store.stack
        if stack is None or not missing(found):
            self._restored(live, found, None)
            return
        live.restore_until_s = time.monotonic() + RESTORE_DEADLINE_S
        store.lanes.read(lambda: fetch(stack, found), lambda fetched: self._restored(live, found, fetched))

    def _restored(self, live: Live, found: Search | None, fetched: Fetched | None) -> None:
        """The tiers have answered, or their time is up: a late answer finds another search, or none, and is ignored."""
        if live.search is None or live.search is not found or live.request.phase is Phase.ENDED:
            return
        request = live.request
        live.search = None
        sources = adopt(request, found, fetched or Fetched({}), self.store)
        prompt = len(request.tokens)
        known = min(request.spec.known_tokens, prompt)
        recomputed = max(0, known - sources.total)
        counters = self.store.counters
        counters.prefix_hit_tokens += sources.device
        counters.restored_host_tokens += sources.host
        counters.restored_nvme_tokens += sources.nvme
        counters.recomputed_tokens += recomputed
        counters.computed_tokens += prompt - sources.total - recomputed
        live.running_s = time.monotonic()
        request.phase = Phase.RUNNING
        live.sink(
            {
                "type": "prefill",
                "request_id": request.spec.request_id,
                "device": sources.device,
                "host": sources.host,
                "nvme": sources.nvme,
                "recomputed": recomputed,
                "computed": prompt - sources.total - recomputed,
            }
        )

    def _step(self, plan: Plan) -> None:
        tiles: list[Tile] = []
        for work in plan.work:
            self.store.grow(work.request, work.start + work.count)
            tiles += _tiles(work)
        logits = iter([row for row in self._backend.forward(tiles) if row is not None])
        self.steps += 1
        for work in plan.work:
            request = work.request
            request.computed = work.start + work.count
            self.store.filled(request, request.spec.salt)
            if work.samples:
                self._sample(self._live[request.spec.request_id], next(logits))

    def _sample(self, live: Live, logits: Logits) -> None:
        request = live.request
        allowed = None
        if live.constraint is not None:
            allowed = live.constraint.allowed()
            if allowed is None:
                self._end(live, "grammar")
                return
        token = sample(logits, request.spec.sampling, len(request.tokens), allowed)
        if live.constraint is not None and not live.constraint.accept(token):
            self._end(live, "grammar")
            return
        if not request.generated:
            live.first_token_s = time.monotonic()
        request.tokens.append(token)
        live.sink({"type": "tokens", "request_id": request.spec.request_id, "ids": [token]})
        if token in self._eos:
            self._end(live, "stop")
        elif len(request.tokens) >= request.limit:
            self._end(live, "length")

    def _end(self, live: Live, reason: str) -> None:
        request = live.request
        self._live.pop(request.spec.request_id, None)
        self.scheduler.remove(request)
        if live.search is not None:
            self.store.pool.release(live.search.held.values())
            live.search = None
        self.store.retire(request)
        live.sink(_done(live, reason))

    def _stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        message = "the engine is stopping" if self.fault is None else f"the engine failed: {self.fault}"
        for live in self._live.values():
            live.sink(
                {
                    "type": "error",
                    "request_id": live.request.spec.request_id,
                    "code": "engine_stopped",
                    "message": message,
                }
            )
        self._live.clear()


def _tiles(work: Work) -> list[Tile]:
    """The tiles of one piece of work, cut at page boundaries; the last one is sampled from if the work samples."""
    tiles = []
    at, end = work.start, work.start + work.count
    tokens, blocks = work.request.tokens, work.request.blocks
    while at < end:
        page = at // PAGE_SIZE
        stop = min(end, (page + 1) * PAGE_SIZE)
        last = work.samples and stop == end
        tiles.append(Tile(tuple(blocks[: page + 1]), at % PAGE_SIZE, tuple(tokens[at:stop]), last))
        at = stop
    return tiles


def _done(live: Live, reason: str) -> Frame:
    now = time.monotonic()
    request = live.request
    first = live.first_token_s
    return {
        "type": "done",
        "request_id": request.spec.request_id,
        "finish_reason": reason,
        "generated": request.generated,
        "ttft_ms": round(1e3 * (first - live.submitted_s), 3) if first else None,
        "prefill_ms": round(1e3 * (first - live.running_s), 3) if first else None,
        "decode_ms": round(1e3 * (now - first), 3) if first else None,
    }
