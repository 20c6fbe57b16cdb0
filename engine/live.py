"""A generation as the core keeps it: the request with its listener, what decides on its tokens and its clock readings;
the frames that tell of it, and the tiles that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.backends.face import Tile, cut
from engine.constraint import Constraint
from engine.drafts import Drafting
from engine.penalties import Seen
from engine.request import Request
from engine.restore import Search, Sources
from engine.sampling import Logprob, Speculation
from engine.scheduler import Work
from engine.sessions import SessionKv
from engine.spans import Waited
from engine.store import Counters
from engine.tokens import StopText

Frame = dict[str, Any]
Sink = Callable[[Frame], None]


@dataclass(frozen=True)
class Guides:
    """What a generation's text must be, and what ends it."""

    constraint: Constraint | None = None
    stop: StopText | None = None


@dataclass
class Live:
    """Clock readings are in seconds, 0 for what has not happened."""

    request: Request
    sink: Sink
    guides: Guides
    submitted_s: float
    queued_s: float
    search: Search | None = None
    restore_until_s: float = 0.0
    admitted_s: float = 0.0
    running_s: float = 0.0
    first_token_s: float = 0.0
    latest_token_s: float = 0.0
    waited: Waited = field(default_factory=Waited)
    account: dict[str, int] = field(default_factory=dict)  # where its tokens came from, when it last began to run
    seen: Seen | None = None  # what penalties depend on
    drafting: Drafting = field(default_factory=Drafting)

    def __post_init__(self) -> None:
        if self.request.spec.sampling.penalises:
            self.seen = Seen(self.request.tokens, self.request.spec.replay)

    @property
    def constraint(self) -> Constraint | None:
        return self.guides.constraint

    @property
    def wants_logits(self) -> bool:
        """Whether its logits are needed where its tokens are."""
        spec = self.request.spec
        return spec.logprobs is not None or spec.speculation is Speculation.RATIO


def account(request: Request, sources: Sources, counters: Counters) -> dict[str, int]:
    """Where the request's tokens come from; those whose KV was there once and is gone count as recomputed."""
    length = len(request.tokens)
    known = max(request.had, min(request.spec.known_tokens, length))
    recomputed = max(0, known - sources.total)
    computed = length - sources.total - recomputed
    counters.prefix_hit_tokens += sources.device
    counters.restored_host_tokens += sources.host
    counters.restored_nvme_tokens += sources.nvme
    counters.restored_shared_tokens += sources.shared
    counters.recomputed_tokens += recomputed
    counters.computed_tokens += computed
    return {
        "device": sources.device,
        "host": sources.host,
        "nvme": sources.nvme,
        "shared": sources.shared,
        "recomputed": recomputed,
        "computed": computed,
    }


def tiles_of(work: Work, drafts: Sequence[int] = ()) -> list[Tile]:
    """The tiles of one piece of work; the last one is sampled from if the work samples, every row if there are drafts
    behind it."""
    request, end = work.request, work.start + work.count
    tokens = [*request.tokens[work.start : end], *drafts]
    return cut(request.blocks, work.start, tokens, wants_logits=work.samples, all_logits=bool(drafts))


def token_frame(live: Live, token: int, logprob: Logprob | None) -> Frame:
    frame: Frame = {"type": "tokens", "request_id": live.request.spec.request_id, "ids": [token]}
    return frame if logprob is None else {**frame, "logprobs": [logprob.as_message()]}


def error_frame(live: Live, code: str, message: str) -> Frame:
    return {"type": "error", "request_id": live.request.spec.request_id, "code": code, "message": message}


def done_frame(live: Live, reason: str, now_s: float, kv: SessionKv | None) -> Frame:
    """`kv`: what the session has from now on; None where that is nothing."""
    request = live.request
    first = live.first_token_s
    return {
        "type": "done",
        "request_id": request.spec.request_id,
        "finish_reason": reason,
        "generated": request.generated,
        "ttft_ms": round(1e3 * (first - live.submitted_s), 3) if first else None,
        "prefill_ms": round(1e3 * (first - live.running_s), 3) if first else None,
        "decode_ms": round(1e3 * (now_s - first), 3) if first else None,
        "kv_tokens": len(kv.tokens) if kv else 0,
        "kv_keys": [key.hex() for key in kv.keys] if kv else [],
        "stop_text": live.guides.stop.found if live.guides.stop is not None else None,
        "drafted": live.drafting.drafted,
        "accepted": live.drafting.accepted,
        "replayable": request.spec.speculation is not Speculation.RATIO or not live.drafting.drafted,
    }
