"""One generation: what was asked, and how far it has come. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.fields import Fields
from engine.pages import PagePool
from engine.sampling import GREEDY, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS, Sampling, Speculation, parse_sampling
from kvtier import page_keys


class Phase(enum.StrEnum):
    """waiting -> restoring -> running -> ended, and from restoring or running to preempted, which is waiting again; any
    phase may end."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    RESTORING = "restoring"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class GenerateSpec:
    """A checked `generate`. `replay` trailing tokens were generated before in this same generation.

    stop: texts that end it; logprobs: so many alternatives are told with each token, None: nothing is
    """

    request_id: str
    session: str
    epoch: int
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    grammar: str | None = None
    replay: int = 0
    salt: bytes = b""
    known_tokens: int = 0
    use_kv: bool = True
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    speculation: Speculation = Speculation.AUTO

    @property
    def generated_before(self) -> tuple[int, ...]:
        """What this same generation has generated before."""
        return self.token_ids[len(self.token_ids) - self.replay :]


@dataclass(frozen=True)
class Limits:
    """What a request is checked against. `pool_tokens` counts the device pool."""

    context: int
    vocab: int
    pool_tokens: int


@dataclass
class Request:
    """A generation under way. `computed` tokens have their KV in `blocks`; `tokens` grows by what is sampled."""

    spec: GenerateSpec
    limit: int  # prompt and generated tokens together never exceed it
    arrival: int = 0
    overtaken: int = 0  # by how many later arrivals, while it waited
    passed_over: int = 0  # steps since it last had a share of the prefill budget
    preemptions: int = 0
    had: int = 0  # most tokens that it had computed when it was sent back
    claimed_pages: int = 0  # held for it while it is being restored
    left: int = 0  # tokens that neither device nor tiers had when it came
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)  # of whole computed pages
    computed: int = 0
    clean_pages: int = 0  # leading pages that a tier had when they were last looked at
    _chain: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.token_ids)

    @property
    def prompt_length(self) -> int:
        return len(self.spec.token_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens still to be run before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def returning(self) -> bool:
        """Whether its session was here before: it comes back from a tool, or from its user."""
        return self.spec.known_tokens > 0

    @property
    def findable(self) -> int:
        """Leading tokens whose pages may be found for it. What it computed itself it may always have back."""
        return len(self.tokens) if self.spec.use_kv else self.had

    def known_keys(self) -> list[bytes]:
        """Keys of the whole pages that admission may find for its tokens."""
        whole = self.findable // PAGE_SIZE
        if len(self._chain) != whole:
            self._chain = page_keys(self.root, self.tokens[: whole * PAGE_SIZE], PAGE_SIZE) if whole else []
        return self._chain

    def writes_shared(self, pool: PagePool) -> bool:
        """Whether its next token goes into a page that others hold too, and must be copied first."""
        page = self.computed // PAGE_SIZE
        return page < len(self.blocks) and pool.refs(self.blocks[page]) > 1


def admit_spec(spec: GenerateSpec, limits: Limits) -> Request:
    """A waiting Request. Raises RequestError: empty_prompt, token_out_of_range, context_length_exceeded,
    pool_too_small.
    """
    length = len(spec.token_ids)
    if not length:
        raise RequestError("empty_prompt", "token_ids is empty; send at least one token to continue")
    if length >= limits.context:
        raise RequestError(
            "context_length_exceeded",
            f"token_ids has {length} tokens and leaves no room to generate in a context of {limits.context}; "
            "shorten the transcript",
        )
    room = limits.pool_tokens - PAGE_SIZE
    if length >= room:
        raise RequestError(
            "pool_too_small",
            f"token_ids has {length} tokens, which do not fit the device pool of {limits.pool_tokens}; "
            "raise --kv-tokens",
        )
    for index, token in enumerate(spec.token_ids):
        if not 0 <= token < limits.vocab:
            raise RequestError(
                "token_out_of_range", f"token_ids[{index}] is {token}, outside the vocabulary of {limits.vocab}"
            )
    for token, _ in spec.sampling.logit_bias:
        if token >= limits.vocab:
            raise RequestError(
                "token_out_of_range", f"sampling.logit_bias names {token}, outside the vocabulary of {limits.vocab}"
            )
    return Request(spec=spec, limit=min(length + spec.max_tokens, limits.context, room))


def parse_generate(message: Mapping[str, Any]) -> GenerateSpec:
    """A GenerateSpec from a protocol message. Raises RequestError (bad_request) that names the field."""
    fields = Fields(message)
    token_ids = fields.integers("token_ids")
    replay = fields.integer("replay", 0, 0, len(token_ids))
    source = fields.text("kv_source", "any")
    if source not in ("any", "none"):
        raise RequestError("bad_request", f"kv_source is {source!r}; 'any' and 'none' are possible")
    return GenerateSpec(
        request_id=fields.text("request_id"),
        session=fields.text("session"),
        epoch=fields.integer("epoch", 0, 0, 1 << 62),
        token_ids=tuple(token_ids),
        max_tokens=fields.integer("max_tokens", 256, 1, 1 << 30),
        sampling=parse_sampling(fields.mapping("sampling")),
        grammar=fields.optional_text("grammar", 1 << 20),
        replay=replay,
        salt=fields.salt("salt"),
        known_tokens=fields.integer("known_tokens", 0, 0, 1 << 30),
        use_kv=source == "any",
        stop=_stops(fields.texts("stop")),
        logprobs=fields.optional_integer("logprobs", 0, MAX_LOGPROBS),
        speculation=fields.one_of("speculation", Speculation, Speculation.AUTO),
    )


def _stops(given: Sequence[str]) -> tuple[str, ...]:
    if len(given) > MAX_STOPS:
        raise RequestError("bad_request", f"stop has {len(given)} texts; {MAX_STOPS} are allowed")
    for index, text in enumerate(given):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                "bad_request", f"stop[{index}] has {len(text)} characters; 1 to {MAX_STOP_CHARS} are needed"
            )
    return tuple(given)
