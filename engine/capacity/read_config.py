"""A Hugging Face config.json as `ModelFacts`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from engine.capacity.facts import ModelFacts, Parameters, grouped
from engine.capacity.families import FAMILIES, family_of
from engine.capacity.keys import LIMITS, Keys
from engine.capacity.numbers import WEIGHT_BITS, weights_dtype
from engine.errors import PlanError

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64


def parse_config(text: str | bytes, name: str = "config.json") -> dict[str, Any]:
    """The JSON object in a text of at most MAX_BYTES. Raises PlanError."""
    if len(text) > MAX_BYTES:
        raise PlanError(name, f"it has more than {MAX_BYTES} bytes, which no config.json has")
    try:
        value = json.loads(text)
    except RecursionError:
        raise PlanError(name, "it is nested too deeply to be a config") from None
    except ValueError as error:
        raise PlanError(name, f"it is not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise PlanError(name, f"it is JSON, but a {type(value).__name__} instead of an object")
    return value


def read_config(config: Mapping[str, Any], name: str = "") -> ModelFacts:
    """Facts of the model that a config.json describes; of one that also sees or hears, of its language model.

    Raises PlanError, whose key is the one of the config that is missing, impossible, or contradicts another.
    """
    assumed: list[str] = []
    config = _language_part(config, assumed)
    family = family_of(config)
    keys = Keys(config, assumed)
    sketch = FAMILIES[family](keys)
    vocab = keys.integer("vocab_size", "vocab", sketch.vocab)
    if not keys.has("tie_word_embeddings"):
        assumed.append(f"tie_word_embeddings {str(sketch.tied).lower()}, as {family} models have it")
    tied = keys.flag("tie_word_embeddings", sketch.tied)
    parameters = Parameters(
        embedding=vocab * sketch.hidden, head=0 if tied else vocab * sketch.hidden, norm=sketch.hidden
    )
    for layer in sketch.layers:
        parameters += layer.parameters
    weights, of_experts = _weights(keys)
    return ModelFacts(
        name=name or _name(config, family),
        family=family,
        layers=len(sketch.layers),
        hidden=sketch.hidden,
        query_heads=sketch.query,
        kv_heads=sketch.kept,
        context=_context(keys, sketch.context),
        vocab=vocab,
        groups=grouped([layer.group for layer in sketch.layers]),
        parameters=parameters,
        experts=sketch.experts,
        degrees=(*((("num_attention_heads", sketch.query.count),) if sketch.query.count else ()), *sketch.degrees),
        weights=weights,
        expert_weights=of_experts,
        assumed=tuple(assumed),
    )


def _language_part(config: Mapping[str, Any], assumed: list[str]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    assumed.append("only the language model is counted, not what sees or hears")
    outer = {key: config[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in config}
    family = inner.get("model_type", config.get("model_type"))
    return {**outer, **inner, "model_type": family}


def _context(keys: Keys, default: int | None) -> int:
    """What the config says, and what YaRN stretches it to."""
    context = keys.integer("max_position_embeddings", "context", default)
    rope = keys.config.get("rope_parameters") or keys.config.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "yarn":
        inner = Keys(rope)
        original = inner.integer("original_max_position_embeddings", "context", context)
        context = max(context, int(original * inner.real("factor", 1.0)))
    return min(context, LIMITS["context"])


def _weights(keys: Keys) -> tuple[str, str]:
    """The numbers that the checkpoint has, and those of its experts where only they are in others."""
    quantised = keys.config.get("quantization_config")
    said = keys.config.get("dtype", keys.config.get("torch_dtype"))
    plain = said if isinstance(said, str) and said not in ("auto", "") else ""
    if not plain:
        keys.assumed.append("weights in bf16")
    plain = weights_dtype("torch_dtype", plain or "bf16")
    if not isinstance(quantised, Mapping):
        return plain, ""
    method = str(quantised.get("quant_method", ""))[:40]
    if method == "mxfp4":
        return plain, "mxfp4"
    if method in WEIGHT_BITS:
        return method, ""
    bits = quantised.get("bits", quantised.get("weight_bits"))
    if method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8"):
        four = bits == 4 or quantised.get("load_in_4bit") is True
        found = "int4" if four else "fp8" if method == "fbgemm_fp8" else "int8"
        keys.assumed.append(f"weights in {found}, by its quantization_config ({method})")
        return found, ""
    raise PlanError(
        "quantization_config", f"quant_method {method!r} is not known; say --weights-dtype and leave it out"
    )


def _name(config: Mapping[str, Any], family: str) -> str:
    said = config.get("_name_or_path")
    return said[:200] if isinstance(said, str) and said else family
