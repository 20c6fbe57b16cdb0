"""A real core over a backend that spends time as a test says, and the doctor's figures of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.backends.face import Logits, Tile
from engine.backends.moves import Arrival
from engine.doctor import Death, Figures, Finding, Report, examine, figures
from engine.memory_use import Bill, MemoryUse
from engine.reports import Reports
from engine.scheduler import Budget
from kvtier import TierStack
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped

DECODE_S, TOKEN_S = 0.02, 0.0001


def owed(dtype: str = "bf16", weights_bytes: int = 10**6, pool_tokens: int = 4096) -> Bill:
    return Bill(weights_bytes, 256 * pool_tokens, 0, 256, pool_tokens, 512, 10**5, dtype, on_device=False)


class Timed(FakeBackend):
    """A step takes DECODE_S, and `token_s` for each token of a prompt."""

    token_s = TOKEN_S
    stage: Stage | None = None

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        answer = super().forward(tiles, arrival)
        if self.stage is not None:
            self.stage.now_s += self.seconds(tiles)
        return answer

    def seconds(self, tiles: Sequence[Tile]) -> float:
        prompt = sum(len(tile.tokens) for tile in tiles if len(tile.tokens) > 1 or not tile.wants_logits)
        return DECODE_S + self.token_s * prompt


class Recorded(Timed):
    """Records a step of each batch size the first time, which takes half a second."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.known: set[int] = set()
        self.replays = 0

    def seconds(self, tiles: Sequence[Tile]) -> float:
        if any(len(tile.tokens) > 1 or not tile.wants_logits for tile in tiles):
            return super().seconds(tiles)
        bucket = len(tiles).bit_length()
        if bucket in self.known:
            self.replays += 1
            return DECODE_S
        self.known.add(bucket)
        return 0.5


class Stage(Stepped):
    """`run` takes turns; transfers land after each unless `slow_tier_s` passes before."""

    def __init__(
        self,
        blocks: int,
        stack: TierStack | None = None,
        *,
        backend: Timed | None = None,
        budget: Budget = Budget(),  # noqa: B008 (frozen)
    ) -> None:
        self.timed = backend or Timed(blocks)
        super().__init__(self.timed, blocks, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=4096, budget=budget)
        self.timed.stage = self
        self.slow_tier_s = 0.0

    def crowd(self, count: int, prompt: int, tokens: int) -> None:
        for number in range(count):
            self.submit(f"s{len(self.told)}", [number % 50 + 3] * prompt, tokens, number)

    def run(self, turns: int = 100_000) -> None:
        """Until nothing is left to do, or so many turns."""
        for _ in range(turns):
            if not self.core.scheduler.requests():
                return
            self.turn()
            if self.lanes.reads:
                self.now_s += self.slow_tier_s
                self.lanes.land_read(0)
            if self.lanes.writes:
                self.lanes.land_write()

    def asked(self, ask: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        ask(answers.append)
        while not answers:
            self.lanes.land_write()
        return answers[0]

    def figures(self, bill: Bill | None = None, death: Death | None = None, **more: Any) -> Figures:
        """`more`: of the stats."""
        bill = bill or owed(pool_tokens=self.store.pool.total * 16)
        reports = Reports(self.core, None, MemoryUse(bill, object(), bill.weights_bytes))
        told, stats = self.asked(reports.spans), self.asked(reports.stats)
        return figures("node-1", {"backend": "cpu"}, {**stats, **more}, told, death=death)

    def report(self, part: str, **how: Any) -> Report:
        (report,) = examine(self.figures(**how), part)
        return report

    def findings(self, part: str, **how: Any) -> dict[str, Finding]:
        return {finding.name: finding for finding in self.report(part, **how).findings}
