"""Family by family: which layers a config means. Each function returns a `Sketch`, or raises PlanError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.capacity.facts import Experts, Parameters
from engine.capacity.hybrids import gated_hybrid, jamba, lfm2, pure_mamba, pure_mamba2
from engine.capacity.keys import Keys
from engine.capacity.layers import Heads, Latent, Layer, dense, experts
from engine.capacity.sketch import Sketch
from engine.errors import PlanError

_SLIDING: Final = ("full_attention", "sliding_attention")
_CHOICE_BIAS = ("noaux_tc",)


@dataclass(frozen=True)
class Style:
    """Where plain decoders differ: their biases (q k v, output), norms, and whether the head is the embedding."""

    bias: tuple[bool, bool] = (False, False)
    head_norm: bool = False
    head_size: int = 0
    tied: bool = False


def llama(keys: Keys) -> Sketch:
    biased = keys.flag("attention_bias")
    return plain(keys, Style((biased, biased)))


def qwen2(keys: Keys) -> Sketch:
    return plain(keys, Style((True, False)))


def qwen3(keys: Keys) -> Sketch:
    biased = keys.flag("attention_bias")
    return plain(keys, Style((biased, biased), head_norm=True, head_size=128))


def plain(keys: Keys, style: Style) -> Sketch:
    """Attention and a dense feed-forward in each layer, a norm before each of the two."""
    hidden, count, ffn = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers"), _ffn(keys)
    heads = Heads.read(keys, hidden, style.head_size)
    mlp = dense(hidden, ffn, bias=keys.flag("mlp_bias"))
    layers = [
        heads.layer(window=window, bias=style.bias, head_norm=style.head_norm).with_mlp(mlp, 2 * hidden)
        for window in windows(keys, count)
    ]
    return Sketch(hidden, heads, layers, tied=style.tied, degrees=(("intermediate_size", ffn),))


def windows(keys: Keys, count: int) -> list[int]:
    """Per layer how many tokens a query sees; 0: all. As the family has it, and as transformers reads it."""
    family = keys.config["model_type"]
    named = keys.names("layer_types", count, _SLIDING)
    if family == "mistral":
        size = keys.integer("sliding_window", "context") if keys.has("sliding_window") else 0
        return [size] * count
    if not family.startswith("qwen") and named is None:
        return [0] * count
    if family.startswith("qwen") and not keys.flag("use_sliding_window"):
        return [0] * count
    since = keys.integer("max_window_layers", "layers", 28, least=0) if named is None else 0
    named = named or [_SLIDING[at >= since] for at in range(count)]
    if _SLIDING[1] not in named:
        return [0] * count
    size = keys.integer("sliding_window", "context")
    return [size if one == _SLIDING[1] else 0 for one in named]


def gemma(keys: Keys, *, norms: int, head_norm: bool, every: int) -> Sketch:
    """Gemma 2 and 3: `norms` of the hidden size a layer; all layers but each `every`-th see a window."""
    newer = head_norm  # what older files of Gemma 3 leave out
    hidden = keys.integer("hidden_size", "size", 2304 if newer else None)
    count = keys.integer("num_hidden_layers", "layers", 26 if newer else None)
    ffn = keys.integer("intermediate_size", "ffn", 9216 if newer else None)
    heads = Heads.read(keys, hidden, 256, heads=8 if newer else None, kept=4 if newer else None)
    size = keys.integer("sliding_window", "context", 4096)
    every = keys.integer("sliding_window_pattern", "layers", every) if keys.has("sliding_window_pattern") else every
    named = keys.names("layer_types", count, _SLIDING) or [_SLIDING[(at + 1) % every != 0] for at in range(count)]
    layers = [
        heads.layer(window=size if one == _SLIDING[1] else 0, head_norm=head_norm).with_mlp(
            dense(hidden, ffn), norms * hidden
        )
        for one in named
    ]
    vocab = None if not newer else 262_208
    return Sketch(hidden, heads, layers, tied=True, degrees=(("intermediate_size", ffn),), vocab=vocab, context=131_072)


def mixtral(keys: Keys) -> Sketch:
    hidden, count, ffn = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers"), _ffn(keys)
    heads = Heads.read(keys, hidden)
    routed = _routed(keys, "num_local_experts", count, hidden)
    window = keys.integer("sliding_window", "context") if keys.has("sliding_window") else 0
    one = heads.layer(window=window).with_mlp(experts(hidden, ffn, routed.count), 2 * hidden)
    return Sketch(hidden, heads, [one] * count, experts=routed, degrees=(("intermediate_size", ffn),))


def qwen_moe(keys: Keys, style: Style) -> Sketch:
    """Qwen2-MoE (shared expert with a gate) and Qwen3-MoE (none)."""
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    heads = Heads.read(keys, hidden, style.head_size)
    sparse = sparse_layers(keys, count)
    routed = _routed(keys, "num_experts", sum(sparse), hidden)
    mixture, width = qwen_mixture(keys, hidden, routed.count)
    plain_mlp = Parameters() if all(sparse) else dense(hidden, _ffn(keys))
    layers = [
        heads.layer(window=window, bias=style.bias, head_norm=style.head_norm).with_mlp(
            mixture if has else plain_mlp, 2 * hidden
        )
        for window, has in zip(windows(keys, count), sparse, strict=True)
    ]
    return Sketch(hidden, heads, layers, experts=routed, degrees=(("moe_intermediate_size", width),))


def qwen_mixture(keys: Keys, hidden: int, count: int) -> tuple[Parameters, int]:
    """A layer's experts, the shared one and its gate among them; and the width of an expert."""
    width = keys.integer("moe_intermediate_size", "ffn")
    mixture = experts(hidden, width, count)
    if keys.has("shared_expert_intermediate_size"):
        shared = keys.integer("shared_expert_intermediate_size", "ffn", least=0)
        if shared:
            mixture += dense(hidden, shared) + Parameters(router=hidden)
    return mixture, width


def sparse_layers(keys: Keys, count: int) -> list[bool]:
    """Which layers are mixtures, as Qwen's configs say it."""
    step = keys.integer("decoder_sparse_step", "layers", 1) if keys.has("decoder_sparse_step") else 1
    denied = set(keys.indices("mlp_only_layers", count) or ())
    return [at not in denied and (at + 1) % step == 0 for at in range(count)]


def deepseek(keys: Keys) -> Sketch:
    """DeepSeek V2 and V3, and Kimi K2, which is the same in other sizes. Layers that guess ahead are not counted."""
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    latent, ffn = Latent.read(keys, hidden), _ffn(keys)
    first = min(count, keys.integer("first_k_dense_replace", "layers", 0, least=0))
    step = keys.integer("moe_layer_freq", "layers") if keys.has("moe_layer_freq") else 1
    sparse = [at >= first and at % step == 0 for at in range(count)]
    routed, mixture = None, Parameters()
    degrees: tuple[tuple[str, int], ...] = (("intermediate_size", ffn),) if not all(sparse) else ()
    if any(sparse):
        routed = _routed(keys, "n_routed_experts", sum(sparse), hidden)
        width = keys.integer("moe_intermediate_size", "ffn")
        shared = keys.integer("n_shared_experts", "experts", least=0) if keys.has("n_shared_experts") else 0
        corrected = keys.config.get("topk_method") in _CHOICE_BIAS or keys.config["model_type"] != "deepseek_v2"
        mixture = experts(hidden, width, routed.count, router_bias=corrected) + dense(hidden, width * shared)
        degrees += (("moe_intermediate_size", width),)
    one = latent.layer()
    layers = [one.with_mlp(mixture if has else dense(hidden, ffn), 2 * hidden) for has in sparse]
    return Sketch(hidden, latent, layers, experts=routed, degrees=degrees)


def gpt_oss(keys: Keys) -> Sketch:
    """Biases everywhere, a sink for each head, every other layer with a window."""
    hidden, count, ffn = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers"), _ffn(keys)
    heads = Heads.read(keys, hidden, 64)
    routed = _routed(keys, "num_local_experts", count, hidden)
    size = keys.integer("sliding_window", "context", 128)
    named = keys.names("layer_types", count, _SLIDING) or [_SLIDING[(at + 1) % 2] for at in range(count)]
    mixture = experts(hidden, ffn, routed.count, bias=True, router_bias=True)
    layers = [
        heads.layer(window=size if one == _SLIDING[1] else 0, bias=(True, True), more=heads.query.count).with_mlp(
            mixture, 2 * hidden
        )
        for one in named
    ]
    return Sketch(hidden, heads, layers, experts=routed, degrees=(("intermediate_size", ffn),))


def qwen3_next(keys: Keys) -> Sketch:
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    sparse = sparse_layers(keys, count)
    routed = _routed(keys, "num_experts", sum(sparse), hidden)
    mixture, width = qwen_mixture(keys, hidden, routed.count)
    plain_mlp = Parameters() if all(sparse) else dense(hidden, _ffn(keys))
    mixers, heads, degrees = gated_hybrid(keys, hidden, count)
    layers: list[Layer] = [
        mixer.with_mlp(mixture if has else plain_mlp, 2 * hidden) for mixer, has in zip(mixers, sparse, strict=True)
    ]
    return Sketch(hidden, heads, layers, experts=routed, degrees=(*degrees, ("moe_intermediate_size", width)))


def _jamba(keys: Keys) -> Sketch:
    hidden, count, ffn = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers"), _ffn(keys)
    mixers, heads, sparse = jamba(keys, hidden, count)
    routed = _routed(keys, "num_experts", sum(sparse), hidden) if any(sparse) else None
    mixture = experts(hidden, ffn, routed.count) if routed else Parameters()
    layers = [
        mixer.with_mlp(mixture if has else dense(hidden, ffn), 2 * hidden)
        for mixer, has in zip(mixers, sparse, strict=True)
    ]
    return Sketch(hidden, heads, layers, experts=routed, degrees=(("intermediate_size", ffn),))


def _ffn(keys: Keys) -> int:
    return keys.integer("intermediate_size", "ffn")


def _routed(keys: Keys, key: str, layers: int, width: int) -> Experts:
    """Raises PlanError where a token would go to more experts than there are."""
    count = keys.integer(key, "experts")
    active = keys.integer("num_experts_per_tok", "experts")
    if active > count:
        raise PlanError("num_experts_per_tok", f"{active} is more than the {count} of {key}")
    return Experts(count, active, layers, width)


def _tied(read: Callable[[Keys], Sketch]) -> Callable[[Keys], Sketch]:
    return lambda keys: replace(read(keys), tied=True)


FAMILIES: Final[Mapping[str, Callable[[Keys], Sketch]]] = {
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma2": lambda keys: gemma(keys, norms=4, head_norm=False, every=2),
    "gemma3": lambda keys: gemma(keys, norms=4, head_norm=True, every=6),
    "gemma3_text": lambda keys: gemma(keys, norms=4, head_norm=True, every=6),
    "gpt_oss": gpt_oss,
    "jamba": _jamba,
    "kimi_k2": deepseek,
    "lfm2": lfm2,
    "llama": llama,
    "mamba": pure_mamba,
    "mamba2": pure_mamba2,
    "mistral": lambda keys: plain(keys, Style()),
    "mixtral": mixtral,
    "phi3": lambda keys: plain(keys, Style()),
    "qwen2": qwen2,
    "qwen2_moe": lambda keys: qwen_moe(keys, Style((keys.flag("qkv_bias", True), False))),
    "qwen3": qwen3,
    "qwen3_moe": lambda keys: qwen_moe(keys, Style((keys.flag("attention_bias"),) * 2, head_norm=True)),
    "qwen3_next": qwen3_next,
}


def family_of(config: Mapping[str, Any]) -> str:
    """The `model_type` of a config. Raises PlanError where it is none that can be planned."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        said = f"{family[:60]!r} is not known" if isinstance(family, str) else "the config does not have it"
        raise PlanError("model_type", f"{said}; known are {', '.join(FAMILIES)}")
    return family
