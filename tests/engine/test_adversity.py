"""Random lives of sessions against an oracle: whatever happens to pages, tokens are right and the books add up."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import Tier
from tests.engine.fakes import Generation, Harness, oracle

SESSIONS = st.sampled_from(["a", "b", "c", "d"])
PIECES = st.lists(st.integers(0, 62), min_size=1, max_size=40)

OPERATIONS = st.one_of(
    st.tuples(st.just("turn"), SESSIONS, PIECES, st.integers(1, 30)),
    st.tuples(st.just("cut"), SESSIONS, PIECES, st.integers(0, 6)),
    st.tuples(st.just("fork"), SESSIONS, SESSIONS, st.integers(1, 12)),
    st.tuples(st.just("rewind"), SESSIONS, st.integers(1, 60), st.integers(1, 12)),
    st.tuples(st.just("kv"), SESSIONS, st.sampled_from(["pin", "release", "prefetch", "drop"]), st.just("host")),
    st.tuples(st.just("kv"), SESSIONS, st.just("offload"), st.sampled_from(["host", "nvme"])),
    st.tuples(st.just("together"), PIECES, st.integers(1, 12), st.just(0)),
)


class World:
    """Transcripts as the caller knows them, beside the engine."""

    def __init__(self, engine: Harness) -> None:
        self.engine = engine
        self.transcripts: dict[str, list[int]] = {name: [1 + index] for index, name in enumerate("abcd")}

    def act(self, operation: tuple[object, ...]) -> None:
        kind, *rest = operation
        getattr(self, str(kind))(*rest)

    def turn(self, session: str, piece: list[int], count: int) -> None:
        prompt = self.transcripts[session][-200:] + piece
        done = self.engine.generate(session, prompt, count, known_tokens=len(prompt) - len(piece))
        self._check(prompt, done)
        assert len(done.tokens) == count
        self.transcripts[session] = prompt + done.tokens

    def cut(self, session: str, piece: list[int], after: int) -> None:
        prompt = self.transcripts[session][-200:] + piece
        running = self.engine.start(session, prompt, 60, cancel_after=after)
        if not after:
            self.engine.cancel(running)
        self._check(prompt, running.finish())
        assert len(running.tokens) == after or running.end["finish_reason"] == "length"
        self.transcripts[session] = prompt + running.tokens

    def fork(self, source: str, target: str, count: int) -> None:
        self.transcripts[target] = list(self.transcripts[source])
        self.turn(target, [62], count)

    def rewind(self, session: str, back: int, count: int) -> None:
        kept = self.transcripts[session]
        self.transcripts[session] = kept[: max(1, len(kept) - back)]
        self.turn(session, [61], count)

    def kv(self, session: str, intent: str, tier: str) -> None:
        receipt = self.engine.kv(intent, session, tier=tier)
        assert receipt["status"] in ("accepted", "clipped", "missing"), receipt

    def together(self, piece: list[int], count: int, _: int) -> None:
        prompts = {name: [*kept[-100:], *piece, index] for index, (name, kept) in enumerate(self.transcripts.items())}
        running = {name: self.engine.start(name, prompt, count) for name, prompt in prompts.items()}
        for name, generation in running.items():
            self._check(prompts[name], generation.finish())
            self.transcripts[name] = prompts[name] + generation.tokens

    def _check(self, prompt: list[int], done: Generation) -> None:
        assert done.end["type"] == "done", done.end
        assert done.tokens == oracle(prompt, len(done.tokens))
        if done.prefill:
            told = sum(done.prefill[name] for name in ("device", "host", "nvme", "recomputed", "computed"))
            assert told == len(prompt)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, min_size=1, max_size=25))
def test_whatever_happens_to_pages_the_tokens_are_right_and_nothing_leaks(operations: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as root, Harness(Path(root), blocks=24, host_pages=20, nvme_pages=30) as engine:
        world = World(engine)
        for operation in operations:
            world.act(operation)
            stats = engine.stats()
            assert stats["integrity"] == "ok"
            assert stats["pool"]["held"] == stats["pinned_pages"]
        for session in world.transcripts:
            engine.kv("drop", session)
        stats = engine.stats()
        assert stats["pool"]["free"] == stats["pool"]["total"]
        assert engine.stack is not None
        assert not engine.stack.keys(Tier.HOST) | engine.stack.keys(Tier.NVME)
