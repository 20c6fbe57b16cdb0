"""Runs one mode of one model over the tasks, with the engine's own backend, sampler and grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.compiled import BenchError
from bench.eval_tasks import (
    QUESTION_EXAMPLES,
    QUESTIONS,
    SYSTEM_QUESTIONS,
    SYSTEM_TOOLS,
    TEXT,
    TOOL_EXAMPLES,
    TOOL_TASKS,
    TOOLS,
)
from bench.evidence import Line
from bench.runners import opened_weights
from engine.backends.choose import BackendSettings, open_backend
from engine.backends.face import Backend, Logits, Tile, cut
from engine.constraint import Constraint, Constraints
from engine.errors import EngineError
from engine.facts import PAGE_SIZE, ModelFacts
from engine.precision import Precision
from engine.sampler import sample
from engine.sampling import Sampling
from engine.tokens import load_chat_format
from engine.weights import Weights

_TOOL_TOKENS, _ANSWER_TOKENS = 72, 24
_PREFILL_TOGETHER = 8
_ROWS_TOGETHER = 64
_POOL_BLOCKS = 1024
_GROUP = 32
_FORMATS = (Precision("w4a16"), Precision("w8a16"), Precision("bf16", "e4m3"), Precision("w4a16", "e4m3"))
FORMATS = {str(precision): precision for precision in _FORMATS}  # of a GPU; see `bench.eval_formats`
Spoil = Callable[[Weights], Weights]
LogProbabilities = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Asked:
    """One generation: what comes after the shared prefix, how much may be said, and under which grammar."""

    tokens: list[int]
    limit: int
    constraint: Constraint | None = None
    said: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Steps(Protocol):
    """What an eval needs of a backend."""

    def forward(self, tiles: Sequence[Tile]) -> list[Logits | None]: ...


class Mode:
    """A model in one dtype, or in one of FORMATS as a CPU can show it. Raises BenchError where it has none such."""

    def __init__(self, model: Path, dtype: str, *, threads: int, spoil: Spoil | None = None) -> None:
        self.dtype = dtype
        facts, weights = _opened(model, dtype)
        weights = spoil(weights) if spoil else weights
        settings = BackendSettings("cpu", _POOL_BLOCKS, threads, model.parent / "cache")
        try:
            backend = open_backend(settings, facts, weights, lambda what, done: None)
        except (EngineError, KeyError, ValueError) as error:
            raise BenchError(f"cpu cannot run {dtype}: {error}") from error
        self._backend: Steps = _rounding(backend) if dtype in FORMATS and FORMATS[dtype].kv == "e4m3" else backend
        self._tokenizer, self._chat = load_chat_format(model)
        self._constraints = Constraints(model, facts.vocab)
        self._context = facts.context

    def tool_calls(self, tasks: int) -> Iterator[Line]:
        """One line per task: the call that was made, under a grammar that admits exactly one call."""
        chat = self._chat
        grammar = chat.tool_grammar(TOOLS, "required")
        assert grammar is not None
        asked = [
            Asked(chat.user(task.text) + chat.assistant_open(), _TOOL_TOKENS, self._constraints.build(grammar))
            for task in TOOL_TASKS[:tasks]
        ]
        prefix = chat.opening(SYSTEM_TOOLS, TOOLS)
        for text, example in TOOL_EXAMPLES:
            prefix += chat.user(text) + chat.assistant("", [example])
        self._generate(prefix, asked)
        for task, one in zip(TOOL_TASKS, asked, strict=False):
            calls = chat.parse_assistant(one.said).calls
            call = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
            yield {"kind": "tool", "mode": self.dtype, "task": task.key, "call": call, "ids": one.said}

    def answers(self, questions: int) -> Iterator[Line]:
        """One line per question: what was said, freely."""
        chat = self._chat
        asked = [Asked(chat.user(q.text) + chat.assistant_open(), _ANSWER_TOKENS) for q in QUESTIONS[:questions]]
        prefix = chat.opening(SYSTEM_QUESTIONS)
        for text, answer in QUESTION_EXAMPLES:
            prefix += chat.user(text) + chat.assistant(answer)
        self._generate(prefix, asked)
        for question, one in zip(QUESTIONS, asked, strict=False):
            said = self._tokenizer.decode(one.said)
            yield {"kind": "answer", "mode": self.dtype, "question": question.key, "said": said, "ids": one.said}

    def positions(self, most: int) -> LogProbabilities:
        """[positions, vocab]: log-probabilities after every token of the text, up to `most` tokens."""
        ids = self._tokenizer.encode(TEXT)[:most]
        blocks = tuple(range(-(-len(ids) // PAGE_SIZE)))
        found: list[LogProbabilities] = []
        for start in range(0, len(ids), _ROWS_TOGETHER):
            rows = range(start, min(start + _ROWS_TOGETHER, len(ids)))
            tiles = [Tile(blocks[: at // PAGE_SIZE + 1], at % PAGE_SIZE, (ids[at],), True) for at in rows]
            found += [_log_softmax(logits) for logits in self._backend.forward(tiles) if logits is not None]
        return np.stack(found)

    def _generate(self, prefix: list[int], asked: Sequence[Asked]) -> None:
        """Greedy decoding of all of them together; whole pages of the prefix are computed once and shared."""
        shared = len(prefix) // PAGE_SIZE
        self._backend.forward(cut(range(shared), 0, prefix[: shared * PAGE_SIZE]))
        free = iter(range(shared, _POOL_BLOCKS))
        for one in asked:
            one.tokens = prefix + one.tokens
            pages = -(-(len(one.tokens) + one.limit) // PAGE_SIZE)
            one.blocks = [*range(shared), *(next(free) for _ in range(pages - shared))]
        for at in range(0, len(asked), _PREFILL_TOGETHER):
            self._step(asked[at : at + _PREFILL_TOGETHER], shared * PAGE_SIZE)
        going = list(asked)
        while going := [one for one in going if self._goes_on(one)]:
            self._step(going, None)

    def _step(self, asked: Sequence[Asked], start: int | None) -> None:
        """Run what each has beyond `start`, or its newest token, and sample the next one of each."""
        tiles = []
        for one in asked:
            tokens = one.tokens + one.said
            at = len(tokens) - 1 if start is None else start
            tiles += cut(one.blocks, at, tokens[at:])
        logits = [row for row in self._backend.forward(tiles) if row is not None]
        for one, row in zip(asked, logits, strict=True):
            allowed = one.constraint.allowed() if one.constraint else None
            token = sample(row, Sampling(), len(one.tokens) + len(one.said), allowed)
            if one.constraint:
                one.constraint.accept(token)
            one.said.append(token)

    def _goes_on(self, one: Asked) -> bool:
        return len(one.said) < one.limit and one.said[-1] not in self._tokenizer.eos_token_ids


def _opened(model: Path, dtype: str) -> tuple[ModelFacts, Weights]:
    if dtype not in FORMATS:
        return opened_weights(model, dtype)
    try:
        from bench.eval_formats import opened_format
    except ImportError as error:
        raise BenchError(f"{dtype} is packed as for a GPU, and Triton is not installed: {error}") from error
    return opened_format(model, FORMATS[dtype])


def _rounding(backend: Backend) -> Steps:
    from bench.eval_formats import E4m3Pages

    return E4m3Pages(backend)


def compare(mode: str, reference: LogProbabilities, found: LogProbabilities) -> Iterator[Line]:
    """One line per position: whether the most likely token is the same, and KL(reference || found) in nats."""
    best, other = reference.argmax(axis=1), found.argmax(axis=1)
    kl = (np.exp(reference.astype(np.float64)) * (reference.astype(np.float64) - found)).sum(axis=1)
    for at in range(len(reference)):
        yield {"kind": "position", "mode": mode, "at": at, "same": bool(best[at] == other[at]), "kl": float(kl[at])}


def disturb(weights: Weights) -> Weights:
    """Sabotage: layers of the middle half trade places, first with last and so on, where they are of one kind."""
    arrays = dict(weights.arrays)
    layers = 1 + max(int(name.partition(".")[0]) for name in arrays if name[0].isdigit())
    low, high = layers // 4, layers - layers // 4 - 1
    while low < high:
        pair = [{n.partition(".")[2]: n for n in arrays if n.startswith(f"{at}.")} for at in (low, high)]
        kinds = [{part: (arrays[n].shape, arrays[n].dtype) for part, n in names.items()} for names in pair]
        if kinds[0] == kinds[1]:
            for part, name in pair[0].items():
                arrays[name], arrays[pair[1][part]] = arrays[pair[1][part]], arrays[name]
        low, high = low + 1, high - 1
    return Weights(weights.dtype, arrays)


def coarsen(weights: Weights) -> Weights:
    """Sabotage: bf16 matrices rounded to 15 steps per group of 32, as a careless repacking would."""
    assert weights.dtype == "bf16"
    arrays = dict(weights.arrays)
    for name, array in arrays.items():
        if array.ndim == 2 and name != "embed":
            values = (array.astype(np.uint32) << 16).view(np.float32).reshape(len(array), -1, _GROUP)
            scale = np.maximum(np.abs(values).max(axis=2, keepdims=True), 1e-12) / 7
            rounded = (np.rint(values / scale) * scale).astype(np.float32).reshape(array.shape)
            arrays[name] = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return Weights(weights.dtype, arrays)


def _log_softmax(logits: np.ndarray[Any, np.dtype[np.float32]]) -> LogProbabilities:
    scores = logits.astype(np.float64)
    scores -= scores.max()
    found: LogProbabilities = (scores - np.log(np.exp(scores).sum())).astype(np.float32)
    return found
