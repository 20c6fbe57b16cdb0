"""Greedy tokens against transformers, on the same dequantised weights, in fp32 throughout."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import Tile
from engine.facts import PAGE_SIZE, ModelFacts
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


def reference(facts: ModelFacts, weights: dict[str, Any]) -> Any:
    """The transformers model of the same architecture, with our weights put in by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": facts.vocab,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.ffn,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "max_position_embeddings": facts.context,
        "rms_norm_eps": facts.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": facts.rope_base},
        "tie_word_embeddings": facts.tied_output,
        "attn_implementation": "eager",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = (
                LlamaForCausalLM(LlamaConfig(**sizes))
                if facts.arch == "llama"
                else Qwen2ForCausalLM(Qwen2Config(**sizes))
            )
    state = {name: torch.from_numpy(value) for name, value in named(facts, weights).items()}
    told = model.load_state_dict(state, strict=False, assign=True)
    assert not told.unexpected_keys
    assert set(told.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers, off the meta device
    model.eval()
    return model


def named(facts: ModelFacts, weights: dict[str, Any]) -> dict[str, Any]:
    """Our fused matrices, split, under the names of transformers."""
    q, kv = facts.hidden, facts.kv_heads * facts.head_size
    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    if not facts.tied_output:
        state["lm_head.weight"] = weights["head"]
    for layer in range(facts.layers):
        at = f"model.layers.{layer}."
        kinds = [("weight", "qkv")] + ([("bias", "qkv_bias")] if facts.qkv_bias else [])
        for kind, fused in kinds:
            parts = np.split(weights[f"{layer}.{fused}"], [q, q + kv])
            state |= {f"{at}self_attn.{c}_proj.{kind}": part for c, part in zip("qkv", parts, strict=True)}
        gate, up = np.split(weights[f"{layer}.gate_up"], 2)
        state |= {
            f"{at}input_layernorm.weight": weights[f"{layer}.attn_norm"],
            f"{at}post_attention_layernorm.weight": weights[f"{layer}.ffn_norm"],
            f"{at}self_attn.o_proj.weight": weights[f"{layer}.o"],
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": weights[f"{layer}.down"],
        }
    return state


def greedy(backend: Any, prompt: list[int]) -> list[int]:
    tokens, at = list(prompt), 0
    while len(tokens) < len(prompt) + NEW_TOKENS:
        tiles = []
        while at < len(tokens):
            page = at // PAGE_SIZE
            stop = min(len(tokens), (page + 1) * PAGE_SIZE)
            tiles.append(Tile(tuple(range(page + 1)), at % PAGE_SIZE, tuple(tokens[at:stop]), stop == len(tokens)))
            at = stop
        logits = backend.forward(tiles)[-1]
        assert logits is not None
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


Pair = tuple[dict[str, Any], Any, dict[str, list[int]]]


@pytest.fixture(scope="module", params=MODELS)
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
    return backends, reference(loaded.facts, weights.arrays), prompts


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
