"""Policy: who runs next."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.facts import PAGE_SIZE
from engine.request import GenerateSpec, Phase, Request
from engine.scheduler import RETURN_HEAD_START, Budget, Plan, Scheduler


def request(length: int, generate: int = 16, known: int = 0, name: str = "r") -> Request:
    spec = GenerateSpec(name, "s", 0, tuple(range(length)), generate, known_tokens=known)
    return Request(spec, limit=length + generate)


def run(scheduler: Scheduler, plan: Plan) -> None:
    """What the engine does with a plan, without a model."""
    for admitted in plan.admit:
        admitted.phase = Phase.RUNNING
    for work in plan.work:
        work.request.computed = work.start + work.count
        if work.samples:
            work.request.tokens.append(0)
            if len(work.request.tokens) >= work.request.limit:
                scheduler.remove(work.request)


def test_a_prompt_is_cut_into_chunks_at_page_boundaries() -> None:
    scheduler = Scheduler(100, Budget(prefill_tiles_alone=4))
    scheduler.add(request(150))
    run(scheduler, scheduler.schedule())
    sizes = []
    while not (plan := scheduler.schedule()).work[0].samples:
        sizes.append(plan.work[0].count)
        run(scheduler, plan)
    assert sizes == [64, 64]
    assert plan.work[0].count == 22


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    scheduler = Scheduler(1000, Budget(prefill_tiles_beside_decode=2))
    first = request(5, generate=50)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    run(scheduler, scheduler.schedule())
    scheduler.add(request(900))
    run(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [(work.request is first, work.count) for work in plan.work] == [(True, 1), (False, 2 * PAGE_SIZE)]


def test_admission_reserves_all_that_a_request_may_ever_need() -> None:
    scheduler = Scheduler(10)
    scheduler.add(request(60, generate=20))
    scheduler.add(request(60, generate=20))
    assert len(scheduler.schedule().admit) == 1
    assert scheduler.reserved_pages == 6
    assert scheduler.waiting == 1


def test_a_session_that_comes_back_goes_first_but_not_for_ever() -> None:
    scheduler = Scheduler(10, Budget(running=1))
    stranger = request(10, name="stranger")
    scheduler.add(stranger)
    returning = [request(10, known=5, name=f"back{i}") for i in range(RETURN_HEAD_START + 3)]
    order = []
    for back in returning:
        scheduler.add(back)
    while scheduler.waiting:
        (admitted,) = scheduler.schedule().admit
        order.append(admitted.spec.request_id)
        scheduler.remove(admitted)
    assert order[0] == "back0"
    assert order.index("stranger") <= RETURN_HEAD_START


def test_pins_that_leave_no_room_for_the_only_request_are_named() -> None:
    scheduler = Scheduler(10)
    scheduler.add(request(100, generate=28))
    plan = scheduler.schedule(pinned_pages=5)
    assert not plan.admit
    assert plan.unpin_pages == 4


def test_pins_are_left_alone_while_someone_runs() -> None:
    scheduler = Scheduler(12)
    scheduler.add(request(10, generate=10))
    run(scheduler, scheduler.schedule())
    scheduler.add(request(100, generate=28))
    assert scheduler.schedule(pinned_pages=5).unpin_pages == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 2**20),
)
def test_every_request_ends_whatever_arrives(arrivals: list[tuple[int, int, bool]], rhythm: int) -> None:
    scheduler = Scheduler(12, Budget(prefill_tiles_alone=3, prefill_tiles_beside_decode=1, running=3))
    waiting = [request(n, g, known=int(back)) for n, g, back in arrivals]
    everyone = list(waiting)
    for step in range(5000):
        if (waiting and (rhythm >> (step % 20)) & 1) or (step > 50 and waiting):
            scheduler.add(waiting.pop(0))
        plan = scheduler.schedule()
        run(scheduler, plan)
        assert scheduler.reserved_pages <= 12
        if not waiting and not scheduler.requests():
            break
    assert all(r.phase is Phase.ENDED and len(r.tokens) == r.limit for r in everyone)
