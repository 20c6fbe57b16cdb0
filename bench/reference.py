"""transformers with our weights in it, as one more engine to be measured."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.compiled import BenchError
from bench.runners import Logits, Piece, Sizes, opened_weights
from engine.facts import ModelFacts
from engine.weights import Weights


class Transformers:
    """transformers in bf16 with its own cache: one for lone sequences, one for the whole batch."""

    def __init__(self, model: Path, sizes: Sizes) -> None:
        import torch

        torch.set_num_threads(sizes.threads)
        self._torch = torch
        self._model = _opened(model) if model.is_dir() else reference(*opened_weights(model, "bf16"), "sdpa")
        self._caches: dict[tuple[int, ...], Any] = {}
        import transformers

        self.about = {"transformers": transformers.__version__, "torch": torch.__version__}

    def cut(self, sequence: int, position: int) -> None:
        for sequences, cache in [*self._caches.items()]:
            if sequence not in sequences or cache.get_seq_length() <= position:
                continue
            if position:
                cache.crop(position - cache.get_seq_length())
            else:
                del self._caches[sequences]

    def step(self, pieces: Sequence[Piece]) -> Logits:
        from transformers import DynamicCache

        key = tuple(sequence for sequence, _, _ in pieces)
        cache = self._caches.setdefault(key, DynamicCache(config=self._model.config))
        if cache.get_seq_length() != pieces[0][1]:
            raise BenchError("a step of transformers does not begin where its sequences end")
        ids = self._torch.tensor([list(ids) for _, _, ids in pieces])
        with self._torch.inference_mode():
            answer = self._model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits: Logits = answer.logits[:, -1].float().numpy().copy()
        return logits

    def close(self) -> None:
        self._caches.clear()


def _opened(directory: Path) -> Any:
    """The transformers model of a Hugging Face directory, in bf16."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
        return model.eval()


def reference(facts: ModelFacts, weights: Weights, attention: str) -> Any:
    """The transformers model of this architecture with our weights in it, in their dtype (bf16 or fp32).

    Raises BenchError where transformers names other weights.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

        sizes: dict[str, Any] = {
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
            "attn_implementation": attention,
            "dtype": torch.float32 if weights.dtype == "fp32" else torch.bfloat16,
        }
        with torch.device("meta"):
            llama = facts.arch == "llama"
            model: Any = LlamaForCausalLM(LlamaConfig(**sizes)) if llama else Qwen2ForCausalLM(Qwen2Config(**sizes))
    told = model.load_state_dict(_state(facts, weights), strict=False, assign=True)
    if told.unexpected_keys or set(told.missing_keys) - {"lm_head.weight"}:
        raise BenchError(f"transformers has other weights than ours: {told}")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers, off the meta device
    return model.eval()


def _state(facts: ModelFacts, weights: Weights) -> dict[str, Any]:
    """Our fused matrices, split, under the names of transformers."""
    import torch

    def tensor(array: Any) -> Any:
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        whole = torch.from_numpy(array.copy())
        return whole if weights.dtype == "fp32" else whole.bfloat16()

    arrays = {name: tensor(array) for name, array in weights.arrays.items()}
    q, kv = facts.hidden, facts.kv_heads * facts.head_size
    state = {"model.embed_tokens.weight": arrays["embed"], "model.norm.weight": arrays["norm"]}
    if not facts.tied_output:
        state["lm_head.weight"] = arrays["head"]
    for layer in range(facts.layers):
        at = f"model.layers.{layer}."
        kinds = [("weight", "qkv")] + ([("bias", "qkv_bias")] if facts.qkv_bias else [])
        for kind, fused in kinds:
            parts = arrays[f"{layer}.{fused}"].split([q, kv, kv])
            state |= {f"{at}self_attn.{c}_proj.{kind}": part for c, part in zip("qkv", parts, strict=True)}
        gate, up = arrays[f"{layer}.gate_up"].chunk(2)
        state |= {
            f"{at}input_layernorm.weight": arrays[f"{layer}.attn_norm"],
            f"{at}post_attention_layernorm.weight": arrays[f"{layer}.ffn_norm"],
            f"{at}self_attn.o_proj.weight": arrays[f"{layer}.o"],
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": arrays[f"{layer}.down"],
        }
    return state
