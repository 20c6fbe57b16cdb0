"""Greedy tokens against transformers, on the same dequantised weights, in fp32 throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.reference import reference
from engine.backends.face import cut
from engine.tokens import load_chat_format
from tests.engine.conftest import MODELS, load, model_path, models_dir

pytestmark = pytest.mark.model

NEW_TOKENS = 16
CLOSE = 1e-3  # where the reference's two best logits lie closer than this, either token is right
PROMPTS = {
    "code": "def fibonacci(n):\n    ",
    "prose": "The lighthouse keeper climbed the stairs every evening, because",
    "digits": "2, 4, 8, 16, 32, 64, 128,",
    "unicode": "Le château était fermé. 東京は",
}


def greedy(backend: Any, prompt: list[int]) -> list[int]:
    tokens, at = list(prompt), 0
    while len(tokens) < len(prompt) + NEW_TOKENS:
        logits = backend.forward(cut(range(len(tokens)), at, tokens[at:]))[-1]
        at = len(tokens)
        assert logits is not None
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


Pair = tuple[dict[str, Any], Any, dict[str, list[int]]]


LARGER = pytest.param(MODELS[1], marks=pytest.mark.soak)  # the exact mode's suite runs it on cpu anyway


@pytest.fixture(scope="module", params=[MODELS[0], LARGER])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Backends by name, the reference, prompts by name."""
    path = model_path(request.param)
    loaded = load(path)
    cache = models_dir() / "cache"
    weights = loaded.weights("fp32", cache)
    backends = {name: loaded.backend(name, "fp32", 16, cache) for name in ("torch", "cpu")}
    tokenizer, chat = load_chat_format(path)
    prompts = {name: tokenizer.encode(text) for name, text in PROMPTS.items()}
    prompts["chat"] = chat.opening(None) + chat.user("Name three rivers in Europe.") + chat.assistant_open()
    return backends, reference(loaded.facts, weights, "eager"), prompts


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", [*PROMPTS, "chat"])
def test_greedy_tokens_are_those_of_transformers(pair: Pair, name: str, backend: str) -> None:
    backends, model, prompts = pair
    ours = greedy(backends[backend], prompts[name])
    with torch.inference_mode():
        logits = model(torch.tensor([prompts[name] + ours])).logits[0, len(prompts[name]) - 1 : -1]
    for index, (token, row) in enumerate(zip(ours, logits, strict=True)):
        best = row.topk(2)
        if token == int(best.indices[0]):
            continue
        near = float(best.values[0] - row[token])
        assert near < CLOSE, f"token {index} is {token}, transformers says {int(best.indices[0])} by {near}"
        return
