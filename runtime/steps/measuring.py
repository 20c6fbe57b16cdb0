"""How much of a model's context a transcript takes.

Where the tokens are the model's own, they are counted. Where a model server has tokens of its own and the transcript is
made of bytes, what the server counted at the session's last think says how many of ours make one of its; before that,
BYTES_PER_TOKEN do. Whether a transcript fits is then for the server to say: nothing is refused here that might.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine import ModelCard
from runtime.steps.services import Services
from runtime.store import steps

BYTES_PER_TOKEN: Final = 3.0  # few enough for code and for most languages; room is made rather too early
MOST_BYTES_PER_TOKEN: Final = 16.0
COUNTED_AS_ONE: Final = 4  # bytes that count as a token spent, until the server says what it was


@dataclass(frozen=True)
class Measure:
    """`length`: the context in the model's tokens; `per_token`: of the transcript's, how many make one of them."""

    length: int
    per_token: float = 1.0
    exact: bool = True

    @property
    def context(self) -> int:
        """The context in tokens of the transcript."""
        return self.of(self.length)

    @property
    def most(self) -> int:
        """So many tokens of a transcript fit into no context."""
        return self.length if self.exact else int(self.length * max(self.per_token, MOST_BYTES_PER_TOKEN))

    def tokens(self, count: int) -> int:
        """Tokens of a transcript in the model's."""
        return round(count / self.per_token)

    def of(self, tokens: int) -> int:
        """The model's tokens in those of a transcript."""
        return int(tokens * self.per_token)

    def longest(self, wanted: int, used: int) -> int:
        """Tokens that may be generated behind a transcript of `used`, of those wanted; at least one where that is for a
        server to say."""
        room = self.length - self.tokens(used)
        return min(wanted, room) if self.exact else max(1, min(wanted, max(room, self.length // 16)))


async def measure(s: Services, session_id: str) -> Measure:
    card = s.engine.card
    if not card.external:
        return Measure(card.context_length)
    counted = await steps.counted_last(s.db, session_id)
    per_token = max(1.0, counted[0] / counted[1]) if counted and counted[1] else BYTES_PER_TOKEN
    return Measure(card.context_length, per_token, exact=False)


def spent(card: ModelCard, count: int) -> int:
    """What so many sampled tokens of a transcript count in a budget, before it is known better."""
    return -(-count // COUNTED_AS_ONE) if card.external else count
