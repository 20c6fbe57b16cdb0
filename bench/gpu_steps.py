"""Whole models on the device: decode steps eager and replayed, and logits beside the CPU backend's."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_course import Course
from bench.gpu_random import LARGE, SMALL, TINY, facts_of, weights_of, write_model
from bench.runners import opened_weights
from engine.backends.choose import BackendSettings, open_backend
from engine.backends.face import Backend, Tile, cut
from engine.backends.triton import Triton
from engine.facts import PAGE_SIZE
from runtime.settings import Settings

CATALOGUED = "smollm2-135m-instruct.gguf"
_BATCHES, _DRY_BATCHES = (1, 8, 32), (1, 2)
_CONTEXT, _DRY_CONTEXT = 2048, 40
_PROMPT, _DRY_PROMPT = 100, 37
_STEPS = 8
_REPEATS = 30
_WAYS = ("eager", "graph")


def decode(course: Course) -> None:
    """Steps of lone tokens, wall and host time, run one kernel after the other and replayed as a graph."""
    shape, batches = (TINY, _DRY_BATCHES) if course.dry else (LARGE, _BATCHES)
    context = _DRY_CONTEXT if course.dry else _CONTEXT
    pages = -(-context // PAGE_SIZE)
    backend = Triton(facts_of(shape), weights_of(shape), pool_blocks=pages * batches[-1])
    for batch in batches:
        tiles = [
            Tile(tuple(range(row * pages, (row + 1) * pages)), (context - 1) % PAGE_SIZE, (3 + row,), True)
            for row in range(batch)
        ]
        with torch.inference_mode(), backend._streams.on(backend._streams.compute):
            for way in _WAYS:
                seconds = course.walls(_Step(backend, tiles, way).whole, _REPEATS)
                host = [_Step(backend, tiles, way).launched() for _ in range(1 if course.dry else _REPEATS)]
                course.say("step", way=way, batch=batch, context=context, seconds=seconds, host_seconds=host)


@dataclass(frozen=True)
class _Step:
    """A decode step, launched kernel by kernel (eager) or replayed (graph)."""

    backend: Triton
    tiles: list[Tile]
    way: str

    def whole(self) -> None:
        """Until its logits are on the host."""
        if self.way == "graph":
            self.backend.forward(self.tiles)
        else:
            self.backend._fetch(self.backend._eager(self.tiles, None))

    def launched(self) -> float:
        """Seconds until all of it is launched, the device idle before."""
        began = time.perf_counter()
        if self.way == "graph":
            self.backend._captured.for_rows(len(self.tiles), len(self.tiles[0].blocks)).launch(self.tiles)
        else:
            self.backend._eager(self.tiles, None)
        took = time.perf_counter() - began
        self.backend._streams.finish(self.backend._streams.compute)
        return took


def logits(course: Course) -> None:
    """A prompt and forced tokens after it, on the GPU and on the CPU: every row of logits compared."""
    settings = Settings.load()
    catalogued = settings.models_dir / CATALOGUED
    with tempfile.TemporaryDirectory() as spare:
        real = catalogued.is_file() and not course.dry
        model = catalogued if real else write_model(Path(spare) / "random-llama.gguf", TINY if course.dry else SMALL)
        facts, weights = opened_weights(model, "bf16")
    prompt = _DRY_PROMPT if course.dry else _PROMPT
    draw = random.Random(17)
    tokens = [draw.randrange(3, 256) for _ in range(prompt + _STEPS)]
    blocks = -(-len(tokens) // PAGE_SIZE)
    cache = settings.models_dir / "cache"
    backends = {
        name: open_backend(BackendSettings(name, blocks, 2, cache), facts, weights, lambda what, done: None)
        for name in ("cpu", "triton")
    }
    rows = {name: _rows(backend, tokens, prompt) for name, backend in backends.items()}
    for at, (ours, theirs) in enumerate(zip(rows["triton"], rows["cpu"], strict=True)):
        course.say(
            "logits",
            model=model.stem if real else facts.name,
            row=at,
            worst=float(np.abs(ours - theirs).max()),
            spread=float(theirs.std()),
            token=int(ours.argmax()),
            token_cpu=int(theirs.argmax()),
            lead_cpu=float(np.diff(np.sort(theirs)[-2:])[0]),
        )


def _rows(backend: Backend, tokens: Sequence[int], prompt: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Logits after the prompt, then after each token that follows it."""
    blocks = list(range(-(-len(tokens) // PAGE_SIZE)))
    found = []
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, len(tokens)))]:
        last = backend.forward(cut(blocks, start, tokens[start:stop]))[-1]
        assert last is not None
        found.append(last.copy())
    return found
