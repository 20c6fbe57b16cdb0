"""Policy: who runs next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.facts import PAGE_SIZE
from engine.fairness import Fairness
from engine.pages import PagePool
from engine.request import GenerateSpec, Phase, Request
from engine.scheduler import OVERTAKEN_AT_MOST, PASSED_OVER_AT_MOST, Budget, Plan, Scheduler


def request(length: int, generate: int = 16, known: int = 0, name: str = "r", tenant: bytes = b"") -> Request:
    spec = GenerateSpec(name, "s", 0, tuple(range(length)), generate, known_tokens=known, salt=tenant)
    return Request(spec, limit=length + generate, root=bytes(32))


class Engine:
    """What the engine does with plans, without a model: every page is fresh, nothing is found or kept."""

    def __init__(self, blocks: int, budget: Budget = Budget()) -> None:  # noqa: B008 (frozen)
        self.pool = PagePool(blocks)
        self.scheduler = Scheduler(self.pool, budget)
        self.preempted: list[Request] = []

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)

    def step(self, pinned: int = 0) -> Plan:
        """One plan that is not a preemption, carried out."""
        plan = self.scheduler.schedule(pinned)
        while plan.preempt is not None:
            self._send_back(plan.preempt)
            plan = self.scheduler.schedule(pinned)
        for admitted in plan.admit:
            admitted.phase = Phase.RUNNING
        for work in plan.work:
            self._run(work.request, work.start + work.count, work.samples)
        return plan

    def end(self, one: Request) -> None:
        self.pool.release(one.blocks)
        one.blocks = []
        self.scheduler.remove(one)

    def _run(self, one: Request, end: int, samples: bool) -> None:
        while len(one.blocks) * PAGE_SIZE < end:
            one.blocks.append(self.pool.allocate(1)[0].block)
        one.computed = end
        if samples:
            one.tokens.append(0)
            if len(one.tokens) >= one.limit:
                self.end(one)

    def _send_back(self, one: Request) -> None:
        self.preempted.append(one)
        self.pool.release(one.blocks)
        one.blocks, one.keys, one.computed = [], [], 0
        self.scheduler.send_back(one)


def sizes(plan: Plan) -> list[int]:
    return [work.count for work in plan.work]


def test_a_prompt_is_cut_into_chunks_that_end_where_pages_end() -> None:
    engine = Engine(100, Budget(prefill_alone=70))
    engine.add(request(150))
    engine.step()
    assert [sizes(engine.step()) for _ in range(3)] == [[64], [64], [22]]


def test_a_chunk_smaller_than_a_page_still_goes_forward() -> None:
    engine = Engine(100, Budget(prefill_alone=7))
    engine.add(request(40, generate=2))
    engine.step()
    assert [sizes(engine.step()) for _ in range(8)] == [[7], [7], [2], [7], [7], [2], [7], [1]]


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    engine = Engine(1000, Budget(prefill_beside_decode=32))
    first = request(5, generate=50)
    engine.add(first)
    engine.step()
    engine.step()
    engine.add(request(900))
    engine.step()
    plan = engine.step()
    assert [(work.request is first, work.count) for work in plan.work] == [(True, 1), (False, 2 * PAGE_SIZE)]


def test_admission_takes_what_a_request_needs_now_not_what_it_may_ever_need() -> None:
    engine = Engine(10)
    engine.add(request(40, generate=100), request(40, generate=100))
    assert len(engine.step().admit) == 2


def test_a_request_waits_while_the_pages_of_its_prompt_are_not_there() -> None:
    engine = Engine(10)
    engine.add(request(100, generate=2, name="first"), request(60, name="second"))
    assert [r.spec.request_id for r in engine.step().admit] == ["first"]
    assert engine.scheduler.waiting == 1


def test_when_pages_run_out_the_latest_goes_back_and_the_oldest_goes_on() -> None:
    engine = Engine(8)
    oldest, latest = request(30, generate=80, name="oldest"), request(30, generate=80, name="latest")
    engine.add(oldest, latest)
    while not engine.preempted:
        engine.step()
    assert engine.preempted == [latest]
    assert (latest.phase, oldest.phase) == (Phase.PREEMPTED, Phase.RUNNING)
    while oldest.phase is not Phase.ENDED or latest.phase is not Phase.ENDED:
        engine.step()
    assert [len(oldest.tokens), len(latest.tokens)] == [110, 110]


def test_who_was_sent_back_is_admitted_before_newcomers() -> None:
    engine = Engine(8)
    first, second = request(30, generate=80, name="first"), request(30, generate=80, name="second")
    engine.add(first, second)
    while not engine.preempted:
        engine.step()
    engine.add(request(10, name="newcomer", known=5))
    order = []
    while not order:
        order = [r.spec.request_id for r in engine.step().admit]
    assert order[0] == "second"


def test_pins_give_way_before_a_running_request_does() -> None:
    engine = Engine(4)
    engine.add(request(30, generate=20))
    engine.step()
    engine.step()
    pinned = [taken.block for taken in engine.pool.allocate(2)]
    plan = Plan()
    while not plan.unpin_pages:
        assert plan.preempt is None
        plan = engine.scheduler.schedule(pinned_pages=len(pinned))
        for work in plan.work:
            engine._run(work.request, work.start + work.count, work.samples)
    assert plan.unpin_pages == 1


def test_pins_that_leave_no_room_for_the_only_request_are_named() -> None:
    engine = Engine(10)
    engine.pool.allocate(5)
    engine.add(request(128))
    plan = engine.step(pinned=5)
    assert not plan.admit
    assert plan.unpin_pages == 4


def test_pins_are_left_alone_while_someone_runs() -> None:
    engine = Engine(12)
    engine.pool.allocate(5)
    engine.add(request(10, generate=10))
    engine.step(pinned=5)
    engine.add(request(128))
    assert engine.step(pinned=5).unpin_pages == 0


def admitted_one_by_one(engine: Engine) -> list[str]:
    order = []
    while engine.scheduler.waiting:
        (admitted,) = engine.step().admit
        order.append(admitted.spec.request_id)
        engine.end(admitted)
    return order


def test_a_session_that_comes_back_goes_first_but_not_for_ever() -> None:
    engine = Engine(10, Budget(running=1))
    engine.add(request(10, name="stranger"))
    engine.add(*(request(10, known=5, name=f"back{i}") for i in range(OVERTAKEN_AT_MOST + 3)))
    order = admitted_one_by_one(engine)
    assert order[0] == "back0"
    assert order.index("stranger") == OVERTAKEN_AT_MOST


def test_a_tenant_that_floods_the_queue_does_not_keep_others_out() -> None:
    engine = Engine(100, Budget(running=1))
    engine.add(*(request(40, generate=1, name="flood", tenant=b"a") for _ in range(6)))
    engine.add(*(request(40, generate=1, name="other", tenant=b"b") for _ in range(2)))
    order: list[str] = []
    while engine.scheduler.requests():
        order += [r.spec.request_id for r in engine.step().admit]
    assert order[:4] == ["flood", "other", "flood", "other"]


def test_a_tenants_prompt_does_not_wait_for_all_that_another_had_before_it() -> None:
    engine = Engine(1000, Budget(prefill_alone=64))
    engine.add(*(request(400, generate=1, name="flood", tenant=b"a") for _ in range(20)))
    engine.step()
    other = request(40, generate=1, name="other", tenant=b"b")
    engine.add(other)
    for _ in range(4):
        engine.step()
    assert other.generated


def test_idle_time_cannot_be_saved_up() -> None:
    fairness = Fairness()
    fairness.enter(b"busy")
    fairness.serve(b"busy", 1000)
    fairness.enter(b"late")
    assert fairness.served(b"late") == 1000
    fairness.leave(b"late")
    fairness.serve(b"busy", 50)
    fairness.enter(b"late")
    assert fairness.served(b"late") == 1050


def test_what_a_tenant_was_served_is_not_forgotten_when_it_leaves_for_a_moment() -> None:
    fairness = Fairness()
    for tenant in (b"a", b"b"):
        fairness.enter(tenant)
    fairness.serve(b"a", 500)
    fairness.leave(b"a")
    fairness.enter(b"a")
    assert fairness.served(b"a") == 500


def test_a_returning_sessions_few_tokens_do_not_wait_for_a_long_prompt() -> None:
    engine = Engine(1000, Budget(prefill_alone=64))
    engine.add(request(900, name="long"))
    engine.step()
    engine.step()
    engine.add(request(20, known=10, name="back"))
    engine.step()
    assert engine.step().work[0].request.spec.request_id == "back"


def test_a_long_prompt_gets_its_share_however_many_return() -> None:
    engine = Engine(4000, Budget(prefill_alone=16, running=100))
    long = request(200, name="long")
    engine.add(long)
    engine.step()
    waited = 0
    while not long.generated:
        engine.add(request(16, generate=1, known=5))
        before = long.computed
        engine.step()
        waited = 0 if long.computed > before else waited + 1
        assert waited <= PASSED_OVER_AT_MOST


def test_a_page_that_others_hold_is_not_paid_for_twice() -> None:
    engine = Engine(8)
    first = request(64, generate=30)
    engine.add(first)
    engine.step()
    engine.step()
    for block, key in zip(first.blocks, first.known_keys(), strict=True):
        engine.pool.bind(block, key)
    engine.add(request(64, generate=1))
    assert len(engine.scheduler.schedule().admit) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 120), st.integers(1, 60), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
    ),
    st.integers(0, 2**20),
)
def test_every_request_ends_whatever_arrives(arrivals: list[tuple[int, int, bool, int]], rhythm: int) -> None:
    engine = Engine(12, Budget(prefill_alone=40, prefill_beside_decode=9, running=3))
    waiting = [request(n, g, known=int(back), tenant=bytes([t])) for n, g, back, t in arrivals]
    everyone = list(waiting)
    for step in range(5000):
        if waiting and ((rhythm >> (step % 20)) & 1 or step > 50):
            engine.add(waiting.pop(0))
        engine.step()
        engine.pool.check_integrity()
        assert engine.scheduler.owed_pages <= engine.pool.available + len(engine.scheduler.requests())
        if not waiting and not engine.scheduler.requests():
            break
    assert Counter(r.phase for r in everyone) == {Phase.ENDED: len(everyone)}
    assert all(len(r.tokens) == r.limit for r in everyone)
    assert engine.pool.counts().free == 12


def test_of_those_that_return_who_lost_least_goes_first_but_not_for_ever() -> None:
    engine = Engine(100, Budget(running=1))
    lost = request(200, known=190, name="lost")
    lost.left = 200
    engine.add(lost)
    for number in range(OVERTAKEN_AT_MOST + 3):
        whole = request(20, known=10, name=f"whole{number}")
        whole.left = 10
        engine.add(whole)
    order = admitted_one_by_one(engine)
    assert order[0] == "whole0"
    assert order.index("lost") == OVERTAKEN_AT_MOST


def test_a_short_rest_does_not_wait_for_a_long_prompt() -> None:
    engine = Engine(1000, Budget(prefill_alone=64))
    engine.add(request(900, name="long"))
    engine.step()
    engine.add(request(40, name="short"))
    engine.step()
    assert engine.step().work[0].request.spec.request_id == "short"


def test_of_equal_rests_the_first_to_come_goes_first() -> None:
    engine = Engine(100, Budget(running=1))
    engine.add(*(request(40, name=f"r{number}") for number in range(4)))
    assert admitted_one_by_one(engine) == [f"r{number}" for number in range(4)]
