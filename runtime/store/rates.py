"""Token buckets of keys that have a rate: one row each, so that all processes of the API take from the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from runtime.store.database import Database
from runtime.store.keys import Caller

# A bucket holds a minute's worth. One that is empty loses nothing by being asked.
_TAKE: Final = """
INSERT INTO rate_buckets (key_id, tenant_id, level, taken, filled_at)
VALUES ($1, $2, $3::float8 - 1, true, clock_timestamp())
ON CONFLICT (key_id) DO UPDATE SET (level, taken, filled_at) = (
    SELECT CASE WHEN have >= 1 THEN have - 1 ELSE have END, have >= 1, at
    FROM (SELECT clock_timestamp() AS at) clock, LATERAL (SELECT least($3::float8, rate_buckets.level
        + greatest(0, extract(epoch FROM at - rate_buckets.filled_at)::float8) * $3::float8 / 60) AS have) bucket)
RETURNING level, taken
"""


@dataclass(frozen=True)
class Allowance:
    """What is left of a key's rate. `taken`: whether this request may go on."""

    limit: int
    level: float
    taken: bool

    @property
    def retry_after_s(self) -> int:
        """Until there is one again, rounded up."""
        return max(1, math.ceil((1 - self.level) * 60 / self.limit))

    def headers(self) -> dict[str, str]:
        """As OpenAI's clients know them. The reset is when all of it is back."""
        full_s = math.ceil((self.limit - self.level) * 600 / self.limit) / 10
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(int(self.level)),
            "x-ratelimit-reset-requests": f"{full_s:.1f}s",
        }


async def take(db: Database, caller: Caller) -> Allowance | None:
    """One request of the key's; None, and nothing is written, where the key has no rate."""
    limit = caller.requests_per_minute
    if limit is None:
        return None
    row = await db.fetchrow(_TAKE, caller.key_id, caller.tenant_id, limit)
    assert row is not None
    return Allowance(limit, row["level"], row["taken"])
