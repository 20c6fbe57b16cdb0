"""The engine as others see it: an asyncio client of the token-level protocol. Loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.errors import EngineFault, EngineGone, RequestError, ServerUnavailable
from engine.sampling import Logprob, Sampling, Speculation
from engine.wire import ModelCard, encode_frame, parse_address, read_frame

_AUDIT_PARTS = 16


@dataclass(frozen=True)
class Prefill:
    """Where the prompt's KV came from, in tokens. `recomputed`: known before, but gone; `computed`: new."""

    device: int
    host: int
    nvme: int
    shared: int
    recomputed: int
    computed: int


@dataclass(frozen=True)
class Preempted:
    """The pool was short: the generation waits, its pages on their way to the host tier. `tokens` had their KV."""

    pages: int
    tokens: int


@dataclass(frozen=True)
class Resumed:
    """A preempted generation goes on; where its KV came from, in tokens, as in Prefill."""

    device: int
    host: int
    nvme: int
    shared: int
    recomputed: int
    computed: int


@dataclass(frozen=True)
class Tokens:
    """`logprobs`: one for each of them, where they were asked for."""

    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True)
class Done:
    """finish_reason: stop (an eos is the last token, or a stop text was found), length, cancelled, or grammar (it could
    go no further).

    kv_tokens, kv_keys: of the session's pages from now on, as in KvState.
    drafted, accepted: tokens that were guessed and verified, and those that stood.
    replayable: the same request gives the same tokens; not where drafts were verified by the ratio rule.
    usage: tokens as the model server behind the engine counts them (prompt_tokens, cached_tokens, completion_tokens,
    and `estimated` where it did not say); None where the engine's own count is the only one."""

    finish_reason: str
    generated: int
    ttft_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    kv_tokens: int
    kv_keys: Sequence[str]
    stop_text: str | None = None
    drafted: int = 0
    accepted: int = 0
    replayable: bool = True
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class KvReceipt:
    """status: accepted, clipped, deferred, rejected, missing, or external, where a model server keeps its KV itself;
    `detail` is a sentence where it is not accepted.

    tier: where an offload went."""

    status: str
    pages: int
    bytes: int
    ms: float
    detail: str
    tier: str | None = None


@dataclass(frozen=True)
class KvState:
    """Where a session's pages are. `keys` is its page chain, in hex, the last one possibly of a partial page."""

    tokens: int
    device_pages: int
    host_pages: int
    nvme_pages: int
    shared_pages: int
    pinned: bool
    bytes: Mapping[str, int]
    keys: tuple[str, ...]


_EVENTS: dict[str, type[Prefill | Preempted | Resumed | Done]] = {
    "prefill": Prefill,
    "preempted": Preempted,
    "resumed": Resumed,
    "done": Done,
}
Event = Prefill | Tokens | Preempted | Resumed | Done


class EngineClient:
    """One connection; many calls at once. Losing it cancels its generations.

    Every call raises RequestError for the caller's mistakes and EngineGone when the engine cannot be reached any more.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[dict[str, Any] | None]] = {}
        self._gone: str | None = None
        self._card: ModelCard | None = None
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def connect(cls, address: str | Path, *, timeout_s: float = 10.0) -> EngineClient:
        """Connect to a unix socket path or `host:port` and greet the engine."""
        target = parse_address(address)
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(target, str):
                    reader, writer = await asyncio.open_unix_connection(target)
                else:
                    reader, writer = await asyncio.open_connection(*target)
                client = cls(reader, writer)
                client._card = ModelCard.from_message(await client._ask({"type": "hello"}))
        except (OSError, TimeoutError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it took too long"
            raise EngineGone(
                f"no engine answers at {address}: {reason}; is `tenuto up` running on this home?"
            ) from error
        return client

    @property
    def card(self) -> ModelCard:
        """What the engine serves, as it said when greeted."""
        assert self._card is not None
        return self._card

    @property
    def connected(self) -> bool:
        return self._gone is None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; idempotent."""
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def ping(self) -> None:
        """Returns when the engine has said something. Waits for no step of it."""
        await self._ask({"type": "hello"})

    async def abort(self) -> None:
        """Close a connection whose other end may not be reading any more; what was not sent is lost."""
        self._writer.transport.abort()
        await self.close()

    # -- generating -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        request_id: str,
        session: str,
        token_ids: Sequence[int],
        epoch: int = 0,
        max_tokens: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        grammar: str | None = None,
        replay: int = 0,
        salt: bytes = b"",
        known_tokens: int = 0,
        kv_source: str = "any",
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        speculation: Speculation = Speculation.AUTO,
    ) -> AsyncGenerator[Event, None]:
        """One Prefill, then Tokens as they come, then one Done; Preempted and Resumed may come between them. Leaving
        the iteration early cancels the generation.

        replay: trailing tokens of `token_ids` that belong to this same generation (it is being resumed).
        known_tokens: how many tokens of this session once had their KV computed; what is missing of them counts as
        recomputed.
        stop: texts that end it. The tokens that complete one are the last that come.
        logprobs: tell with each token how likely the model had it, and that many alternatives.
        """
        message = {
            "type": "generate",
            "request_id": request_id,
            "session": session,
            "epoch": epoch,
            "token_ids": list(token_ids),
            "max_tokens": max_tokens,
            "sampling": sampling.as_message(),
            "grammar": grammar,
            "replay": replay,
            "salt": salt.hex(),
            "known_tokens": known_tokens,
            "kv_source": kv_source,
            "stop": list(stop),
            "logprobs": logprobs,
            "speculation": speculation.value,
        }
        call_id, frames = self._open_call()
        ended = False
        try:
            await self._send({**message, "id": call_id})
            while not ended:
                event = _event(await self._next(frames))
                ended = isinstance(event, Done)
                yield event
        except (RequestError, EngineFault):
            ended = True
            raise
        finally:
            self._calls.pop(call_id, None)
            if not ended and self.connected:
                with contextlib.suppress(EngineGone):
                    await self._send({"type": "cancel", "id": 0, "request_id": request_id})

    async def cancel(self, request_id: str) -> bool:
        """End a generation. False if it is not running. When this returns, its pages are whole and its own again."""
        result = await self._ask({"type": "cancel", "request_id": request_id})
        return bool(result["cancelled"])

    # -- KV -------------------------------------------------------------------------------------------------------

    async def kv(
        self,
        intent: str,
        *,
        session: str,
        epoch: int = 0,
        salt: bytes = b"",
        token_ids: Sequence[int] | None = None,
        tier: str | None = None,
        wait: bool = False,
        evict: bool = False,
        pause: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
        step: int = 0,
        source: str = "",
    ) -> KvReceipt:
        """pin, offload (tier host, nvme, shared, or auto: the policy decides), prefetch, release or drop. With `wait`,
        the receipt comes when the copy has ended.

        token_ids: the transcript, needed where the engine may have been restarted since.
        pause: why the session waits: state (tool, approval or paused), tool, timeout_s.
        ttl_s: a pin ends by itself. step: the session's step, for the decision log. source: "api" where the intent is
        not the session's own.
        """
        message = {
            "type": "kv",
            "intent": intent,
            "session": session,
            "epoch": epoch,
            "salt": salt.hex(),
            "token_ids": None if token_ids is None else list(token_ids),
            "tier": tier,
            "wait": wait,
            "evict": evict,
            "pause": None if pause is None else dict(pause),
            "ttl_s": ttl_s,
            "step": step,
            "source": source or None,
        }
        return _receipt(await self._ask(message))

    async def kv_state(self, session: str) -> KvState:
        """Where the session's pages are now."""
        state = await self._ask({"type": "kv_state", "session": session})
        names = ("tokens", "device_pages", "host_pages", "nvme_pages", "shared_pages", "pinned", "bytes")
        return KvState(**{name: state[name] for name in names}, keys=tuple(state["keys"]))

    async def kv_hints(self, envelope: Mapping[str, Any], *, salt: bytes = b"") -> list[dict[str, Any]]:
        """An envelope of hints (see `engine.hints`): one receipt per action, in its order."""
        answer = await self._ask({"type": "kv_hints", "envelope": dict(envelope), "salt": salt.hex()})
        return list(answer["receipts"])

    async def decisions(self, after: int = 0, limit: int = 1000) -> tuple[int, list[dict[str, Any]]]:
        """Entries of the decision log that came or changed after a version, and the version to ask for next."""
        answer = await self._ask({"type": "decisions", "after": after, "limit": limit})
        return int(answer["version"]), list(answer["decisions"])

    async def learn(self, salts: Sequence[bytes]) -> None:
        """Tell the engine of salts whose sessions have not come yet: what is encrypted under them can be read."""
        await self._ask({"type": "learn", "salts": [salt.hex() for salt in salts]})

    async def audit(self, *, repair: bool = False, verify: bool = True, every_key: bool = False) -> dict[str, Any]:
        """What lies in every tier, what sessions (`held`) and device name, what is wrong with it. `verify` reads every
        page; `every_key`: it has learned every salt there is, so that a repair may remove what needs another key. Keys
        come in parts: all of them may be more than a frame can hold."""
        message = {
            "type": "audit",
            "repair": repair,
            "verify": verify,
            "every_key": every_key,
            "parts": _AUDIT_PARTS,
        }
        told = await self._ask({**message, "part": 0})
        for part in range(1, _AUDIT_PARTS):
            more = await self._ask({**message, "verify": False, "part": part})
            for name in ("held", "device"):
                told[name] += more[name]
            for tier, keys in more["tiers"].items():
                told["tiers"].setdefault(tier, []).extend(keys)
            if told["integrity"] == "ok":
                told["integrity"] = more["integrity"]
        return told

    async def delete_keys(self, keys: Sequence[str], *, unheld: bool = False) -> KvReceipt:
        """Delete exactly these pages (hex keys), wherever they are. `unheld`: but for those that a session of the
        engine has, or a think under way needs."""
        return _receipt(await self._ask({"type": "delete_keys", "keys": list(keys), "unheld": unheld}))

    async def stats(self) -> dict[str, Any]:
        """Pool, scheduler, counters, tiers; `integrity` is "ok" or says what does not add up."""
        return await self._ask({"type": "stats"})

    async def spans(self) -> dict[str, Any]:
        """`spans`: what the engine's time went into lately (engine.spans); `memory`: what it takes (engine.memory_use);
        `limits`: requests that run at once at most, pages of the pool."""
        told = await self._ask({"type": "spans"})
        return {name: told[name] for name in ("spans", "memory", "limits")}

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        call_id, frames = self._open_call()
        try:
            await self._send({**message, "id": call_id})
            return _checked(await self._next(frames))
        finally:
            self._calls.pop(call_id, None)

    def _open_call(self) -> tuple[int, asyncio.Queue[dict[str, Any] | None]]:
        call_id = next(self._ids)
        frames: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._calls[call_id] = frames
        return call_id, frames

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone is not None:
            raise EngineGone(self._gone)
        try:
            self._writer.write(encode_frame(message))
            await self._writer.drain()
        except OSError as error:
            raise EngineGone(f"the connection to the engine was lost: {error}") from error

    async def _next(self, frames: asyncio.Queue[dict[str, Any] | None]) -> dict[str, Any]:
        if self._gone is not None and frames.empty():
            raise EngineGone(self._gone)
        frame = await frames.get()
        if frame is None:
            raise EngineGone(self._gone or "the connection to the engine was closed")
        return frame

    async def _listen(self) -> None:
        try:
            while True:
                frame = await read_frame(self._reader)
                call_id = frame.get("id")
                if call_id in self._calls:
                    self._calls[call_id].put_nowait(frame)
                elif call_id is None and frame.get("type") == "error":
                    self._gone = str(frame.get("message"))
        except (asyncio.IncompleteReadError, OSError, RequestError) as error:
            self._gone = self._gone or f"the connection to the engine was lost: {type(error).__name__}"
        finally:
            self._gone = self._gone or "the connection to the engine was closed"
            for frames in self._calls.values():
                frames.put_nowait(None)


def _checked(frame: dict[str, Any]) -> dict[str, Any]:
    if frame.get("type") != "error":
        return frame
    code, message = str(frame.get("code")), str(frame.get("message"))
    if code == "server_unavailable":
        raise ServerUnavailable(message, frame.get("retry_after_s"))
    if code in ("engine_fault", "engine_stopped"):
        raise EngineGone(message) if code == "engine_stopped" else EngineFault(message)
    raise RequestError(code, message)


def _event(frame: dict[str, Any]) -> Event:
    kind = _checked(frame)["type"]
    if kind == "tokens":
        told = frame.get("logprobs")
        return Tokens(tuple(frame["ids"]), None if told is None else tuple(map(Logprob.from_message, told)))
    shape = _EVENTS[kind]
    return shape(**{name: frame[name] for name in shape.__dataclass_fields__ if name in frame})


def _receipt(frame: dict[str, Any]) -> KvReceipt:
    fields: dict[str, Any] = {name: frame.get(name) for name in KvReceipt.__dataclass_fields__}
    return KvReceipt(**fields)
