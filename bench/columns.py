"""What is measured: the columns of the table, each a shape of steps that every engine runs alike."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.runners import Logits, Piece, Runner, Sizes

CHUNK = 512  # a prompt comes in pieces of this many tokens, for everyone
_SHORT, _LONG, _PROMPT, _SEQUENCES = 8, 9, 10, 11
_IDS = (3, 256)  # ids that every model has; which they are changes no timing


@dataclass(frozen=True)
class Column:
    """`steps` steps of one token for each of `sequences` at `context` tokens; or, with no steps, a prompt of
    `context` tokens."""

    name: str
    context: int
    steps: int = 0
    sequences: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that go through the model while the clock runs."""
        return self.steps * self.sequences if self.steps else self.context


COLUMNS = (
    Column("prefill_512", 512),
    Column("prefill_2048", 2048),
    Column("decode_128", 128, steps=24),
    Column("decode_2048", 2048, steps=12),
    Column("batch8", 128, steps=8, sequences=8),
)
# The same shapes in small, to see in seconds that everything hangs together.
QUICK = (
    Column("prefill_512", 64),
    Column("prefill_2048", 128),
    Column("decode_128", 16, steps=4),
    Column("decode_2048", 144, steps=4),
    Column("batch8", 16, steps=2, sequences=8),
)


@dataclass(frozen=True)
class Timing:
    """Seconds for `tokens` tokens, and a digest of the logits of every (sequence, step) row, in that order."""

    seconds: float
    tokens: int
    rows: list[str]


def sizes(columns: Sequence[Column], threads: int) -> Sizes:
    """What a runner must hold to run these columns."""
    longest = max(column.context + column.steps for column in columns)
    return Sizes(-(-(longest + 1) // 256) * 256, _SEQUENCES, CHUNK, threads)


def text(sequence: int, length: int) -> list[int]:
    """The token ids of a sequence, the same for every engine."""
    draw = random.Random(7919 + sequence)
    return [draw.randrange(*_IDS) for _ in range(length)]


class Course:
    """Runs columns on one runner. What a column finds in the cache is put there once, before any clock starts.

    Sequences 0 to 7 are the batch; the short context, the long one and the prompts have one of their own each.
    """

    def __init__(self, runner: Runner, columns: Sequence[Column]) -> None:
        self._runner = runner
        self._columns = {column.name: column for column in columns}
        self._filled: dict[tuple[int, ...], int] = {}

    def measure(self, name: str) -> Timing:
        """One timing of a column, after a little of the same work, which wakes threads that have gone to sleep."""
        column = self._columns[name]
        if not column.steps:
            self._prompt(_PROMPT, min(column.context, 64))
            return self._timed(column, lambda: [self._prompt(_PROMPT, column.context)])
        sequences = _sequences(column)
        self._fill(sequences, column.context)
        self._decode(column, sequences, 2)
        return self._timed(column, lambda: self._decode(column, sequences, column.steps))

    def alone(self, name: str) -> list[str]:
        """The digests of a decode column's rows when every sequence runs by itself."""
        column = self._columns[name]
        assert column.steps
        lone = []
        for sequence in _sequences(column):
            self._filled.clear()
            self._fill([sequence], column.context)
            lone.append(self._decode(column, [sequence], column.steps))
        return [_digest(logits[0]) for step in zip(*lone, strict=True) for logits in step]

    def _timed(self, column: Column, work: Callable[[], list[Logits]]) -> Timing:
        began = time.perf_counter()
        steps = work()
        seconds = time.perf_counter() - began
        return Timing(seconds, column.tokens, [_digest(row) for logits in steps for row in logits])

    def _fill(self, sequences: Sequence[int], length: int) -> None:
        key = tuple(sequences)
        if self._filled.get(key) == length:
            return
        ids = {sequence: text(sequence, length) for sequence in sequences}
        chunk = CHUNK // len(sequences)
        for sequence in sequences:
            self._runner.cut(sequence, 0)
        for at in range(0, length, chunk):
            self._runner.step([(sequence, at, ids[sequence][at : at + chunk]) for sequence in sequences])
        self._filled[key] = length

    def _prompt(self, sequence: int, length: int) -> Logits:
        self._runner.cut(sequence, 0)
        ids = text(sequence, length)
        for at in range(0, length, CHUNK):
            logits = self._runner.step([(sequence, at, ids[at : at + CHUNK])])
        return logits

    def _decode(self, column: Column, sequences: Sequence[int], steps: int) -> list[Logits]:
        """One token for each sequence per step; the tokens are given, not sampled."""
        ids = {sequence: text(sequence, column.context + steps)[column.context :] for sequence in sequences}
        for sequence in sequences:
            self._runner.cut(sequence, column.context)
        logits = []
        for step in range(steps):
            pieces: list[Piece] = [(n, column.context + step, [ids[n][step]]) for n in sequences]
            logits.append(self._runner.step(pieces))
        return logits


def _sequences(column: Column) -> list[int]:
    if column.sequences > 1:
        return list(range(column.sequences))
    return [_SHORT if column.context <= 128 else _LONG]


def _digest(row: Logits) -> str:
    return hashlib.sha256(row.tobytes()).hexdigest()[:16]
