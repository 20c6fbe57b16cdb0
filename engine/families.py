"""What a Hugging Face config says of a model, family by family, and what its tensors are called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelFileError
from engine.facts import Mla, ModelFacts, RopeScaling
from engine.rope import yarn_magnitude

Config = Mapping[str, Any]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "deepseek_v2", "deepseek_v3")
_LATENT = ("deepseek_v2", "deepseek_v3")
_MISTRAL_WINDOW = 4096  # what a config that says nothing of it means
_LIMITS = {"layers": 512, "heads": 1024, "hidden": 1 << 20, "ffn": 1 << 22, "context": 1 << 24, "vocab": 1 << 24}

_WHOLE = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    **{f"{name}": f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in ("q", "k", "v")},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in ("q", "k")},
    **{f"{name}_norm": f"self_attn.{name}_layernorm.weight" for name in ("q_a", "kv_a")},
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def tensor_name(part: str) -> str:
    """The tensor that holds a part; see `engine.modelfile.parts`."""
    layer, dot, name = part.partition(".")
    return f"model.layers.{layer}.{_LAYER[name]}" if dot else _WHOLE[part]


def is_interleaved(config: Config) -> bool:
    """Whether rows that are rotated lie as neighbours."""
    family = config["model_type"]
    return family == "deepseek_v2" or (family == "deepseek_v3" and config.get("rope_interleave", True) is not False)


def facts_of(config: Config, size_bytes: int) -> ModelFacts:
    """Facts of a model by its config.json; where it lies is no part of them, so that its pages are found from anywhere.

    Raises ModelFileError without the file's name, for it to be put before.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelFileError(f"it holds a {family!r} model; {', '.join(FAMILIES)} are supported")
    _refuse_what_is_not_supported(config, family)
    read = _Reader(config)
    heads, hidden = read.integer("num_attention_heads", "heads"), read.integer("hidden_size", "hidden")
    plain = ModelFacts(
        name=family,
        arch=family,
        layers=read.integer("num_hidden_layers", "layers"),
        hidden=hidden,
        ffn=read.integer("intermediate_size", "ffn"),
        heads=heads,
        kv_heads=read.integer("num_key_value_heads", "heads", heads),
        head_size=read.integer("head_dim", "hidden", 128 if family == "qwen3" else max(1, hidden // heads)),
        context=read.integer("max_position_embeddings", "context"),
        vocab=read.integer("vocab_size", "vocab"),
        rope_base=read.rope_real("rope_theta", 10_000.0),
        rope_scale=1.0,
        norm_eps=read.real("rms_norm_eps", 1e-6),
        tied_output=config.get("tie_word_embeddings") is True,
        qkv_bias=family == "qwen2",
        size_bytes=size_bytes,
        qk_norm=family == "qwen3",
    )
    shaped = _latent(plain, read) if family in _LATENT else replace(plain, windows=_windows(plain, read))
    if shaped.heads % shaped.kv_heads or shaped.rope_size % 2:
        raise ModelFileError(
            f"{shaped.heads} heads of {shaped.head_size} and {shaped.kv_heads} kv heads do not make a model"
        )
    return _scaled(shaped, read)


def _refuse_what_is_not_supported(config: Config, family: str) -> None:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise ModelFileError(f"its weights are quantised ({method!r}); weights in fp32, fp16 or bf16 are supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"it has the activation {config['hidden_act']!r}; 'silu' is supported")
    if config.get("mlp_bias") or (config.get("attention_bias") and family in ("llama", "qwen3", *_LATENT)):
        raise ModelFileError("it has biases in its output or feed-forward layers, which are not supported")


def _refuse_rope_of_another_kind(read: _Reader) -> None:
    if any(isinstance(value, Mapping) for value in read.rope.values()):
        raise ModelFileError("it turns the positions of some layers in another way than those of others")
    if read.rope_real("partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError("it rotates only a part of each head, which is not supported")


def _windows(facts: ModelFacts, read: _Reader) -> tuple[int, ...]:
    """Per layer; () where no layer has one that is shorter than the context."""
    config, every = read.config, [True] * facts.layers
    if facts.arch == "mistral":
        size = config.get("sliding_window", _MISTRAL_WINDOW)
    else:
        size = config.get("sliding_window") if config.get("use_sliding_window") else None
        kinds = config.get("layer_types") or [
            "sliding_attention" if n >= config.get("max_window_layers", 28) else "full_attention"
            for n in range(facts.layers)
        ]
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != facts.layers:
            raise ModelFileError("its layer_types are not one of full_attention and sliding_attention for every layer")
        every = [kind == "sliding_attention" for kind in kinds]
    if size is None or not any(every):
        return ()
    window = read.integer("sliding_window", "context", _MISTRAL_WINDOW)
    return () if window >= facts.context else tuple(window if has else 0 for has in every)


def _latent(facts: ModelFacts, read: _Reader) -> ModelFacts:
    dense = read.config.get("first_k_dense_replace", 0 if facts.arch == "deepseek_v2" else 3)
    if not isinstance(dense, int) or dense < facts.layers:
        raise ModelFileError(f"layers from {dense} on are mixtures of experts; models of dense layers alone can run")
    mla = Mla(
        q_rank=None if read.config.get("q_lora_rank") is None else read.integer("q_lora_rank", "hidden"),
        kv_rank=read.integer("kv_lora_rank", "hidden"),
        rope_size=read.integer("qk_rope_head_dim", "hidden"),
        nope_size=read.integer("qk_nope_head_dim", "hidden"),
        value_size=read.integer("v_head_dim", "hidden"),
    )
    return replace(facts, kv_heads=1, head_size=mla.kv_rank + mla.rope_size, mla=mla)


def _scaled(facts: ModelFacts, read: _Reader) -> ModelFacts:
    """With what the config says of rotary positions in a longer context."""
    _refuse_rope_of_another_kind(read)
    rope = read.rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return facts
    if kind == "linear":
        return replace(facts, rope_scale=read.rope_real("factor"))
    if kind not in ("llama3", "yarn"):
        raise ModelFileError(f"it scales its rope by {kind!r}; default, linear, llama3 and yarn are supported")
    factor = read.rope_real("factor")
    original = int(read.rope_real("original_max_position_embeddings", float(facts.context)))
    if kind == "llama3":
        low, high = read.rope_real("low_freq_factor"), read.rope_real("high_freq_factor")
        if high <= low:
            raise ModelFileError(f"its rope goes from a factor of {high} down to {low}, which is the wrong way round")
        return replace(facts, rope_scaling=RopeScaling("llama3", factor, original, low, high))
    return replace(
        facts,
        context=min(max(facts.context, int(original * factor)), _LIMITS["context"]),
        rope_scaling=_yarn(facts, read, factor, original),
    )


def _yarn(facts: ModelFacts, read: _Reader, factor: float, original: int) -> RopeScaling:
    rope = read.rope
    every, some = (read.rope_real(name, 0.0) for name in ("mscale_all_dim", "mscale"))
    table = yarn_magnitude(factor)
    if rope.get("attention_factor") is not None:
        table = read.rope_real("attention_factor")
    elif every and some:
        table = yarn_magnitude(factor, some) / yarn_magnitude(factor, every)
    return RopeScaling(
        "yarn",
        factor,
        original,
        low=read.rope_real("beta_slow", 1.0),
        high=read.rope_real("beta_fast", 32.0),
        table_scale=table,
        score_scale=yarn_magnitude(factor, every) ** 2 if facts.mla and every else 1.0,
        truncate=rope.get("truncate", True) is not False,
    )


@dataclass(frozen=True)
class _Reader:
    """Numbers of a config, checked."""

    config: Config

    @property
    def rope(self) -> Config:
        """Whatever the config calls them: `rope_parameters` since transformers 5, `rope_scaling` before."""
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(found := self.config.get(key), Mapping):
                return found
        return {}

    def integer(self, key: str, kind: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LIMITS[kind]:
            raise ModelFileError(f"its config says {key} is {value!r}; 1 to {_LIMITS[kind]} is possible")
        return value

    def real(self, key: str, default: float) -> float:
        return _positive(key, self.config.get(key), default)

    def rope_real(self, key: str, default: float | None = None) -> float:
        value = self.rope.get(key, self.config.get(key))
        return _positive(f"rope's {key}", value, default)


def _positive(key: str, value: object, default: float | None) -> float:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelFileError(f"its config says {key} is {value!r}; a positive number is needed")
    return float(value)
