"""Engines behind one face, so that every one of them is asked for exactly the same steps.

A piece is (sequence, position, tokens): run these tokens of this sequence from this position on, and give the logits
of the last of them. Building the batch and copying the logits out is part of a step, for everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.compiled import BenchError
from bench.llamacpp import LlamaCpp, built
from engine.backends.choose import BackendSettings, open_backend
from engine.backends.face import Backend, cut
from engine.errors import EngineError
from engine.facts import PAGE_SIZE, ModelFacts
from engine.modelfile import open_model
from engine.weights import Weights, load_weights

Piece = tuple[int, int, Sequence[int]]
Logits = np.ndarray[Any, np.dtype[np.float32]]
OURS = ("bf16", "w4a8", "fp32")


@dataclass(frozen=True)
class Sizes:
    """What a runner must hold: `context` tokens in each of `sequences`. At most `batch` tokens come in one step."""

    context: int
    sequences: int
    batch: int
    threads: int


class Runner(Protocol):
    """One engine with one model."""

    @property
    def about(self) -> dict[str, Any]: ...

    def cut(self, sequence: int, position: int) -> None:
        """Forget what a sequence has from `position` on; the next piece begins there."""
        ...

    def step(self, pieces: Sequence[Piece]) -> Logits:
        """Logits [pieces, vocab]. All pieces of a step have the same length."""
        ...

    def close(self) -> None: ...


def open_runner(name: str, model: Path, file: Path | None, sizes: Sizes, options: dict[str, Any]) -> Runner:
    """`name` is `family/mode`: ours/bf16, torch/bf16, transformers/bf16 or llama.cpp/<format>, whose `file` is given.

    Raises BenchError where it cannot be had here.
    """
    family, _, mode = name.partition("/")
    if family == "llama.cpp":
        found = built(native=not options.get("plain_peer"))
        if found is None or file is None:
            raise BenchError("llama.cpp has not been built")
        return _Peer(found, file, sizes, flash=not options.get("flash_off"), unified=mode.endswith("+unified"))
    if family == "transformers":
        from bench.reference import Transformers

        return Transformers(model, sizes)
    return _Ours(model, "torch" if family == "torch" else "cpu", mode, sizes, slowed=int(options.get("slowed", 1)))


def opened_weights(model: Path, dtype: str) -> tuple[ModelFacts, Weights]:
    """Facts and weights of a model. Raises BenchError for a dtype that the engine does not have."""
    with open_model(model) as opened:
        facts = opened.facts()
        try:
            facts.page_bytes(dtype)
            return facts, load_weights(opened, opened.digest(), facts, dtype, model.parent / "cache", lambda done: None)
        except (KeyError, ValueError, EngineError) as error:
            raise BenchError(f"the engine has no {dtype} mode: {error}") from error


def opened_backend(model: Path, dtype: str, blocks: int, threads: int, name: str = "cpu") -> tuple[ModelFacts, Backend]:
    """A backend of ours with a pool of `blocks` pages. Raises BenchError."""
    facts, weights = opened_weights(model, dtype)
    settings = BackendSettings(name, blocks, threads, model.parent / "cache")
    try:
        return facts, open_backend(settings, facts, weights, lambda what, done: None)
    except (EngineError, KeyError, ValueError) as error:
        raise BenchError(f"{name} cannot run {dtype}: {error}") from error


class _Ours:
    """A backend of ours. `slowed`: every step is run this many times, to see that the figures notice."""

    def __init__(self, model: Path, backend: str, dtype: str, sizes: Sizes, slowed: int) -> None:
        pages = -(-sizes.context // PAGE_SIZE)
        _, self._backend = opened_backend(model, dtype, pages * sizes.sequences, sizes.threads, backend)
        self._blocks = [range(n * pages, (n + 1) * pages) for n in range(sizes.sequences)]
        self._slowed = slowed
        identity = self._backend.identity
        self.about = {
            "backend": identity.backend,
            "mode": identity.mode,
            "instruction_set": identity.instruction_set,
            "version": identity.version,
        }

    def cut(self, sequence: int, position: int) -> None:
        pass  # rows are written again before they are attended to

    def step(self, pieces: Sequence[Piece]) -> Logits:
        tiles = [tile for sequence, at, ids in pieces for tile in cut(self._blocks[sequence], at, ids)]
        for _ in range(self._slowed):
            rows = [row for row in self._backend.forward(tiles) if row is not None]
        return np.stack(rows)

    def close(self) -> None:
        pass


class _Peer:
    """llama.cpp; a prompt goes to it in pieces of the size that it is given room for."""

    def __init__(self, found: Any, file: Path, sizes: Sizes, *, flash: bool, unified: bool) -> None:
        self._engine = LlamaCpp(
            found,
            file,
            context=sizes.context,
            sequences=sizes.sequences,
            batch=sizes.batch,
            threads=sizes.threads,
            flash=flash,
            unified=unified,
        )
        self.about = self._engine.about

    def cut(self, sequence: int, position: int) -> None:
        self._engine.cut(sequence, position)

    def step(self, pieces: Sequence[Piece]) -> Logits:
        return self._engine.step(pieces)

    def close(self) -> None:
        self._engine.close()
