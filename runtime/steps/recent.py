"""What lies behind a step: kept from the step before it where that ended here, read from the record where not."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.steps import checkpoints
from runtime.store import standing, steps
from runtime.store.database import Database
from runtime.store.values import Checkpoint, Session
from workflows.contract import InputIn, StepIn, ThinkIn

KEPT = 256  # sessions


@dataclass(frozen=True)
class Past:
    """`tokens`: the transcript; `base`: what its checkpoints say; `known`: how many of the tokens had their KV once;
    `said`: the output of the think that came last, None where another kind of step did; `session`: as the step before
    had it, None where that is not known; `turn`: what its message says for the turn, in place of the session's own."""

    tokens: Sequence[int]
    base: checkpoints.Base
    known: int
    said: Mapping[str, Any] | None = None
    session: Session | None = None
    turn: Mapping[str, Any] = field(default_factory=dict)

    def after(
        self,
        session: Session,
        checkpoint: Checkpoint,
        tokens: Sequence[int],
        known: int | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> Past:
        """With a step more, whose transcript and checkpoint are these."""
        named = self.base.named.union(checkpoint.kv_new) if checkpoint.kv_new else self.base.named
        base = checkpoints.Base(checkpoint.workspace_root, checkpoint.kv_tail, named)
        return Past(tokens, base, self.known if known is None else known, said, session, self.turn)


class Recent:
    """Pasts of the sessions that this node saw last. One counts for the very next step at the same epoch: whatever else
    changes a transcript, as a rewind does, raises the epoch."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._pasts: OrderedDict[str, tuple[int, int, Past]] = OrderedDict()

    def keep(self, session_id: str, epoch: int, step_no: int, past: Past) -> None:
        """What lies behind whatever follows `step_no`, which has just ended."""
        compact = replace(past, tokens=array("I", past.tokens))
        self._pasts[session_id] = (epoch, step_no, compact)
        self._pasts.move_to_end(session_id)
        if len(self._pasts) > self._kept:
            self._pasts.popitem(last=False)

    def find(self, what: StepIn | ThinkIn | InputIn) -> Past | None:
        epoch, step_no, past = self._pasts.get(what.session_id, (0, 0, None))
        if past is None or (epoch, step_no) != (what.epoch, what.step_no - 1):
            return None
        return replace(past, tokens=list(past.tokens))


async def past(db: Database, recent: Recent, what: StepIn | ThinkIn | InputIn) -> Past:
    """Steps before this one have ended, and stay as they are."""
    return recent.find(what) or await read(db, what)


async def read(db: Database, what: StepIn | ThinkIn | InputIn) -> Past:
    """From the record."""
    tokens, base, known, said, turn = await asyncio.gather(
        steps.transcript(db, what.session_id, what.step_no),
        checkpoints.base(db, what.session_id),
        _known(db, what.session_id),
        _said(db, what),
        standing.turn(db, what.session_id),
    )
    return Past(tokens, base, known, said, turn=turn)


async def _known(db: Database, session_id: str) -> int:
    """How many tokens of the transcript had their KV once: as many as the engine held after the last think. Of a think
    that is resumed, all but the last token had."""
    row = await db.fetchrow(
        "SELECT CASE WHEN kind = 'think' THEN (output ->> 'kv_tokens')::int ELSE token_start END AS tokens FROM steps"
        " WHERE session_id = $1 AND kind IN ('think', 'compaction') AND state = 'completed' AND live"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    return int(row["tokens"] or 0) if row else 0


async def _said(db: Database, what: StepIn | ThinkIn | InputIn) -> Mapping[str, Any] | None:
    row = await db.fetchrow(
        "SELECT kind, output FROM steps WHERE session_id = $1 AND step_no < $2 AND live AND state = 'completed'"
        " AND kind IN ('input', 'think', 'tool') ORDER BY step_no DESC LIMIT 1",
        what.session_id,
        what.step_no,
    )
    if row is None or row["kind"] != "think":
        return None
    said: Mapping[str, Any] = row["output"]
    return said
