"""One generation: what was asked, and how far it has come. No torch."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.pages import PagePool
from kvtier import page_keys

MAX_ID_CHARS = 200


class Phase(enum.StrEnum):
    """waiting -> restoring -> running -> ended, and from restoring or running to preempted, which is waiting again; any
    phase may end."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    RESTORING = "restoring"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class GenerateSpec:
    """A checked `generate`. `replay` trailing tokens were generated before in this same generation."""

    request_id: str
    session: str
    epoch: int
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    grammar: str | None = None
    replay: int = 0
    salt: bytes = b""
    known_tokens: int = 0
    use_kv: bool = True


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
    return Request(spec=spec, limit=min(length + spec.max_tokens, limits.context, room))


def parse_generate(message: Mapping[str, Any]) -> GenerateSpec:
    """A GenerateSpec from a protocol message. Raises RequestError (bad_request) that names the field."""
    fields = Fields(message)
    sampling = Fields(fields.mapping("sampling"), "sampling.")
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
        sampling=Sampling(
            temperature=sampling.real("temperature", 0.0, 0.0, 100.0),
            top_k=sampling.integer("top_k", 0, 0, 1 << 30),
            top_p=sampling.real("top_p", 1.0, 0.0, 1.0),
            seed=sampling.integer("seed", 0, 0, (1 << 64) - 1),
        ),
        grammar=fields.optional_text("grammar", 1 << 20),
        replay=replay,
        salt=fields.salt("salt"),
        known_tokens=fields.integer("known_tokens", 0, 0, 1 << 30),
        use_kv=source == "any",
    )


class Fields:
    """Reads typed fields of a message; every mistake is named."""

    def __init__(self, message: Mapping[str, Any], prefix: str = "") -> None:
        self._message = message
        self._prefix = prefix

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, default: float, low: float, high: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._bad(name, value, f"a number from {low} to {high}")
        return float(value)

    def seconds(self, name: str, default: float | None, high: float) -> float | None:
        """A positive number, or the default where none is given."""
        value = self._get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise self._bad(name, value, f"null or a number of seconds above 0, up to {high:.0f}")
        return float(min(value, sys.float_info.max))  # a whole number may be longer than any float

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
            raise self._bad(name, value, f"a text of 1 to {MAX_ID_CHARS} characters")
        return value

    def optional_text(self, name: str, longest: int) -> str | None:
        value = self._message.get(name)
        if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= longest):
            raise self._bad(name, value, f"null or a text of 1 to {longest} characters")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def integers(self, name: str) -> Sequence[int]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(type(item) is int and -1 << 62 < item < 1 << 62 for item in value):
            raise self._bad(name, value, "a list of token ids")
        return value

    def keys(self, name: str) -> list[bytes]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, value, "a list of 64-digit hex keys")
        try:
            keys = [bytes.fromhex(item) for item in value]
        except ValueError as error:
            raise self._bad(name, value, "a list of 64-digit hex keys") from error
        if any(len(key) != 32 for key in keys):
            raise self._bad(name, value, "a list of 64-digit hex keys")
        return keys

    def salt(self, name: str) -> bytes:
        value = self._get(name, "")
        try:
            salt = bytes.fromhex(value)
        except (TypeError, ValueError) as error:
            raise self._bad(name, value, "hex digits") from error
        if len(salt) > 64:
            raise self._bad(name, value, "at most 64 bytes in hex")
        return salt

    def salts(self, name: str) -> list[bytes]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, value, "a list of hex digits")
        return [Fields({name: item}, self._prefix).salt(name) for item in value]

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._message.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._message.get(name)
        return default if value is None else value

    def _bad(self, name: str, value: Any, wanted: str) -> RequestError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return RequestError("bad_request", f"{self._prefix}{name} is {shown}; {wanted} is needed")
