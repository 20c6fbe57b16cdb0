"""The compute thread: takes commands, plans, steps the model, samples, and gives frames to whoever listens.

Everything that touches pages runs here, between steps, so nothing needs a lock. Others talk to it by `post`; it talks
to others through each request's `sink`, which must not block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.backends.face import Backend, CountsReplays, Logits, Tile
from engine.behind import WriteBehind
from engine.drafts import NO_DRAFT, Draft
from engine.drawing import Answer, HostAnswer, answers, token_of
from engine.errors import EngineFault, RequestError
from engine.integrity import check
from engine.live import Guides, Live, Sink, done_frame, error_frame, tiles_of, token_frame
from engine.logprobs import logprob_of
from engine.metrics import Metrics
from engine.observer import Computed, Observer
from engine.request import GenerateSpec, Limits, Phase, admit_spec
from engine.restores import Restores
from engine.scheduler import Plan, Scheduler, Work
from engine.spans import Spans, Step
from engine.speculator import Speculator
from engine.store import KvStore, salt_id


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
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
    ) -> None:
        self.store = store
        self.scheduler = scheduler
        self.limits = limits
        self.metrics = Metrics()
        self.spans = Spans()
        self.steps = 0
        self.fault: BaseException | None = None
        self.speculator = speculator or Speculator(enabled=False)
        self.timers: list[Callable[[float], float | None]] = [
            store.lanes.overdue
        ]  # each gives the seconds until it is next due
        self._observer = Observer()
        self._backend = backend
        self._counts_replays = isinstance(backend, CountsReplays)
        self._eos = frozenset(eos)
        self._inbox = inbox
        self._clock = clock
        self._live: dict[str, Live] = {}
        self._stopping = False
        self._behind = WriteBehind(store, clock)
        self._restores = Restores(store, scheduler, (self.metrics, self.spans), clock, self._sample)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def observe(self, observer: Observer) -> None:
        """From now on, tell this one."""
        self._observer = self._restores.observer = observer

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

    def submit(self, spec: GenerateSpec, guides: Guides, sink: Sink) -> None:
        """Queue a generation. Raises RequestError; frames go to `sink` from here on."""
        request = admit_spec(spec, self.limits)
        if self.store.sessions.fence(spec.session, spec.epoch):
            self.cancel_session(spec.session)
            self.store.unpin_of(spec.session)  # a lease ends with its epoch
        if spec.request_id in self._live:
            raise RequestError("duplicate_request", f"request {spec.request_id!r} is already running")
        request.root = self.store.root(spec.salt)
        self.store.sessions.open(spec.session, salt_id(spec.salt), request.root)
        now = self._clock()
        self._live[spec.request_id] = Live(request, sink, guides, submitted_s=now, queued_s=now)
        request.left = self.store.left(request)
        self.scheduler.add(request)
        self._observer.submitted(spec.session)

    def cancel(self, request_id: str, sink: Sink | None = None) -> bool:
        """End a generation now; what was computed stays the session's. False if there is none, or, with `sink`, if it
        speaks to another."""
        live = self._live.get(request_id)
        if live is None or sink not in (None, live.sink):
            return False
        self._end(live, "cancelled")
        return True

    def cancel_session(self, session: str) -> int:
        """End all generations of a session. Returns how many."""
        running = [live for live in self._live.values() if live.request.spec.session == session]
        for live in running:
            self._end(live, "cancelled")
        return len(running)

    def told_spans(self) -> dict[str, Any]:
        """See `Spans.as_message`."""
        return self.spans.as_message(self._clock())

    def check_integrity(self) -> None:
        """See `integrity.check`. Between turns only."""
        check(self.store, self.scheduler, list(self._live.values()))

    # -- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands(self._patience())
                if self._stopping:
                    return
                self.turn()
        except BaseException as error:
            self.fault = error
            raise
        finally:
            self._close()

    def turn(self) -> None:
        """One round: give up restores that are overdue, copy a slice out, plan, step."""
        self._restores.give_up_overdue(self._live.values())
        if self.store.copies is not None and self.store.copies.waits:
            begun_s = self._clock()
            self.store.copies.pump()
            self.spans.copied(self._clock() - begun_s)
        plan = self._plan()
        if plan.admit:
            begun_s = self._clock()
            for request in plan.admit:
                self._restores.begin(self._live[request.spec.request_id], self._live.values())
            self.spans.admitting(self._clock() - begun_s)
        if plan.work:
            self._step(plan)
        else:
            self.spans.idle()

    def _plan(self) -> Plan:
        """The next step, after what must give way for it has given way. Every round takes away pins or a request."""
        while True:
            plan = self.scheduler.schedule(self.store.pinned_pages)
            if plan.unpin_pages:
                self.store.break_pins(plan.unpin_pages)
            elif plan.preempt is not None:
                self._preempt(self._live[plan.preempt.spec.request_id])
            else:
                return plan

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
        now = self._clock()
        dues = [due for due in (timer(now) for timer in self.timers) if due is not None]
        copying = self.store.copies is not None and self.store.copies.ready
        if copying or any(live.request.phase is Phase.RUNNING for live in self._live.values()):
            return 0
        arriving = self.store.transfers is not None and self.store.transfers.busy
        if self.scheduler.waiting and not self.scheduler.admitted and not arriving:
            return 0  # otherwise there may be no room before a transfer ends, which is a command
        dues += [live.restore_until_s - now for live in self._live.values() if live.search is not None]
        return max(0.001, min(dues)) if dues else None

    # -- one request ----------------------------------------------------------------------------------------------

    def _preempt(self, live: Live) -> None:
        """Send a request back to the queue, its pages to the host tier, and say so."""
        request, counters, begun_s = live.request, self.store.counters, self._clock()
        self._restores.drop(live)
        was_running = request.phase is Phase.RUNNING
        tokens = request.computed
        pages = self.store.swap_out(request)
        self.scheduler.send_back(request)
        live.queued_s = self._clock()
        self.spans.swapped(live.queued_s - begun_s)
        request.preemptions += 1
        request.had = max(request.had, tokens)
        counters.preemptions += 1
        counters.swapped_pages += pages
        if was_running:
            name = request.spec.request_id
            live.sink({"type": "preempted", "request_id": name, "pages": pages, "tokens": tokens})

    def _step(self, plan: Plan) -> None:
        found_s = self._clock()
        drafts = self.speculator.propose(plan, self._live, self.scheduler.spare_pages)
        tiles: list[Tile] = []
        begun_s, evicted, replays = self._clock(), self.store.counters.evicted_dirty, self._replays
        for work, draft in zip(plan.work, drafts, strict=True):
            self.store.grow(work.request, work.start + work.count + len(draft.tokens))
            tiles += tiles_of(work, draft.tokens)
        sampled = [pair for pair in zip(plan.work, drafts, strict=True) if pair[0].samples]
        asked = [(self._live[work.request.spec.request_id], draft) for work, draft in sampled]
        started_s = self._clock()
        if self.store.counters.evicted_dirty > evicted:
            self.spans.swapped(started_s - begun_s)
        given = iter(answers(self._backend, tiles, asked))
        ended_s = self._clock()
        step_s, drafted = ended_s - started_s, sum(len(draft.tokens) for draft in drafts)
        self._measure(plan, step_s, drafted, started_s - found_s)
        captured = replays is not None and not plan.prefill and not drafted
        graph = "none" if not captured else "missed" if self._replays == replays else "replayed"
        self._span(plan, begun_s, step_s, graph)
        busy = False
        for work, draft in zip(plan.work, drafts, strict=True):
            self._live[work.request.spec.request_id].waited.own_s += step_s  # looked at before the first token only
            if work.samples:
                self._settle(work, draft, next(given), len(plan.work))
            else:
                self._computed(work, 0)
            busy = busy or work.request.phase is Phase.RUNNING
        if not plan.prefill and self.store.copies is not None:
            running = [live.request for live in self._live.values() if live.request.phase is Phase.RUNNING]
            begun_s = self._clock()
            self._behind.after_decoding(step_s, running)
            self.spans.copied(self._clock() - begun_s)
        self.spans.ended(ended_s, busy=busy)

    def _span(self, plan: Plan, begun_s: float, step_s: float, graph: str) -> None:
        spans, scheduler, store = self.spans, self.scheduler, self.store
        host_s, preempted, restored = spans.since(begun_s, store.counters.preemptions)
        pool = (scheduler.waiting, scheduler.admitted, store.pool.available)
        spans.step(Step(begun_s, step_s, host_s, plan.decoding, plan.prefill, graph, preempted, restored, *pool))

    @property
    def _replays(self) -> int | None:
        """How many decode steps found what was recorded of them; None of a backend that records nothing."""
        return self._backend.replays if self._counts_replays else None  # type: ignore[attr-defined]

    def _measure(self, plan: Plan, step_s: float, drafts: int, found_s: float) -> None:
        self.steps += 1
        if not drafts:
            self.scheduler.measured(plan, step_s)
        self.speculator.observe(plan, drafts, step_s, found_s)
        self.metrics.step_s.observe(step_s)
        if plan.decoding:
            self.metrics.batch.observe(plan.decoding)
        if plan.prefill:
            self.metrics.prefill_tokens.observe(plan.prefill)
        if drafts:
            self.metrics.draft_s.observe(found_s)

    def _computed(self, work: Work, accepted: int) -> None:
        """The work is done, and so many drafts behind it stand: what does not stand is written over."""
        work.request.computed = work.start + work.count + accepted
        self.store.filled(work.request, work.request.spec.salt)

    def _settle(self, work: Work, draft: Draft, answer: Answer, requests: int) -> None:
        """Take tokens as long as drafts stand, and the one after them: as many steps, each after the other."""
        live = self._live[work.request.spec.request_id]
        accepted = 0
        while True:
            self._computed(work, accepted)
            token = self._take(live, answer, accepted, draft)
            if accepted == len(draft.tokens) or token != draft.tokens[accepted]:
                break
            accepted += 1
            if live.request.phase is not Phase.RUNNING:
                break
        if draft.tokens:
            self.speculator.verified(live, draft, accepted, requests)
            self.metrics.verified_tokens.observe(accepted + 1)
        elif token is not None:
            self.speculator.told(live, token)

    def _sample(self, live: Live, logits: Logits) -> None:
        self._take(live, HostAnswer([logits]), 0, NO_DRAFT)

    def _take(self, live: Live, answer: Answer, index: int, draft: Draft) -> int | None:
        """The next token, and what follows from it. None where there is none: then it has ended."""
        request = live.request
        try:
            token = token_of(live, answer, index, draft)
        except EngineFault as fault:
            self._fail(live, str(fault))
            return None
        if token is None or (live.constraint is not None and not live.constraint.accept(token)):
            self._end(live, "grammar")
            return None
        self._clock_token(live)
        top = request.spec.logprobs
        told = None if top is None else logprob_of(answer.logits(index), token, top)
        request.tokens.append(token)
        if live.seen is not None:
            live.seen.push(token)
        if live.guides.stop is not None:
            live.guides.stop.push([token])
        live.sink(token_frame(live, token, told))
        if token in self._eos or (live.guides.stop is not None and live.guides.stop.found is not None):
            self._end(live, "stop")
        elif len(request.tokens) >= request.limit:
            self._end(live, "length")
        return token

    def _clock_token(self, live: Live) -> None:
        now = self._clock()
        if live.latest_token_s:
            self.metrics.inter_token_s.observe(now - live.latest_token_s)
            self.spans.token(live.waited, now - live.latest_token_s, now)
        else:
            live.first_token_s = now
            self.metrics.first_token_s.observe(now - live.submitted_s)
            self.spans.first(live.waited, now - live.submitted_s, now)
            self._tell_computed(live, now)
        live.latest_token_s = now

    def _tell_computed(self, live: Live, now: float) -> None:
        request, told = live.request, live.account
        stop = len(request.tokens)
        recomputed = told["recomputed"]
        start = stop - recomputed - told["computed"]
        alone = self.scheduler.admitted == 1
        self._observer.computed(request.spec.session, Computed(start, stop, recomputed, now - live.running_s, alone))

    def _end(self, live: Live, reason: str) -> None:
        self._take_out(live)
        self.store.retire(live.request)
        now = self._clock()
        self._observer.rested(live.request.spec.session, now - (live.running_s or now))
        live.sink(done_frame(live, reason, self._clock(), self.store.sessions.get(live.request.spec.session)))

    def _fail(self, live: Live, message: str) -> None:
        """End a request whose pages cannot be trusted: nobody is to find them."""
        self._take_out(live)
        self.store.discard(live.request)
        live.sink(error_frame(live, "engine_fault", message))

    def _take_out(self, live: Live) -> None:
        self._live.pop(live.request.spec.request_id, None)
        self.scheduler.remove(live.request)
        self._restores.drop(live)

    def _stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        message = "the engine is stopping" if self.fault is None else f"the engine failed: {self.fault}"
        for live in self._live.values():
            live.sink(error_frame(live, "engine_stopped", message))
        self._live.clear()
