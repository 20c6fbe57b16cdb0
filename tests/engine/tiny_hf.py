"""Tiny random models in Hugging Face directories, made by transformers itself and by `tokenizers`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.engine.tiny import TEMPLATE, byte_alphabet

HIDDEN, FFN, LAYERS, CONTEXT, WINDOW, VOCAB = 64, 96, 2, 512, 24, 288
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "w"], ["o", "r"]]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "first_k_dense_replace": LAYERS,
    "num_nextn_predict_layers": 0,
    "rope_parameters": YARN,
    "num_key_value_heads": 4,
}
# family -> its config class, and what is its own
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 64}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
}


def write_hf(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    **changes: Any,
) -> Path:
    """Write the model. `changes`: keys of the config to override; `shard`: the most that a weights file may hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        name, own = FAMILIES[family]
        config = getattr(transformers, name)(**_sizes() | own | changes)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        _randomise(model, seed)
        model.save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return directory


def read_hf(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> None:
    write_json(directory / "tokenizer.json", tokenizer_document())
    written = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}, "chat_template": template}
    write_json(directory / "tokenizer_config.json", written)
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 0]})


def tokenizer_document() -> dict[str, Any]:
    """A byte-level tokenizer.json, as the families' own are written."""
    texts = [*byte_alphabet(), *("".join(pair) for pair in MERGES)]
    words = {"Regex": "\\p{N}| ?[^\\s\\p{N}]+|\\s+"}
    split = {"type": "Split", "pattern": words, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {text: 3 + n for n, text in enumerate(texts)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    control = [{"id": n, "content": text, "special": True, **plain} for n, text in enumerate(CONTROL)]
    return {
        "version": "1.0",
        "added_tokens": [*control, {"id": 3 + len(texts), "content": "<tool_call>", "special": False, **plain}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in MERGES]},
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            scale = 1.0 if "embed" in name else 0.2
            value.copy_(1 + 0.2 * noise if "norm" in name else scale * noise)
