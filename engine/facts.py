"""What a model file says about its model, checked against what its tensors really are."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from engine.capacity import PAGE_TOKENS, Group, KvHeads, QueryHeads, attention_group, latent_group, page_bytes
from engine.errors import ModelFileError
from engine.gguf import GgufFile
from engine.precision import kept_in

PAGE_SIZE = PAGE_TOKENS
LATENT_NORM_EPS = 1e-6  # of MLA's latents, whatever a model's own is: so it is in DeepSeek's code and in transformers
ARCHITECTURES = ("llama", "qwen2")
_LIMITS = {"layers": 512, "heads": 1024, "kv_heads": 1024, "hidden": 1 << 20, "ffn": 1 << 22, "context": 1 << 24}


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): a token leaves one latent row and one rotated key.

    A query head has `nope_size` values that are not rotated and `rope_size` that are; a value head has `value_size`.
    `q_rank` is None where queries come from the hidden state at once. Norms of the latents have LATENT_NORM_EPS.
    """

    q_rank: int | None
    kv_rank: int
    rope_size: int
    nope_size: int
    value_size: int


@dataclass(frozen=True)
class RopeScaling:
    """How a longer context was made of a shorter one; see `engine.rope`. Linear scaling is `rope_scale` alone.

    `kind` is llama3 or yarn. `low` and `high` are llama3's frequency factors, or yarn's slow and fast betas. Cosines
    and sines are multiplied by `table_scale`, scores by `score_scale`.
    """

    kind: str
    factor: float
    original_context: int
    low: float
    high: float
    table_scale: float = 1.0
    score_scale: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """Dimensions of a decoder: `head_size` d, `heads` Hq, `kv_heads` Hkv; `size_bytes` is the file's.

    `qk_norm`: queries and keys have an RMS norm over d, before they are rotated. `windows`: per layer, how many tokens
    a query sees, itself among them; 0: all. With `mla` there is one KV head, and d is the width of a latent row, its
    rotated key at the end.
    """

    name: str
    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    vocab: int
    rope_base: float
    rope_scale: float
    norm_eps: float
    tied_output: bool
    qkv_bias: bool
    size_bytes: int
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    mla: Mla | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def query_width(self) -> int:
        """Of all query heads, as they meet the keys of a page: Hq x d. It need not be the hidden size."""
        return self.heads * self.head_size

    @property
    def rope_size(self) -> int:
        """How many values of a query or a key are rotated."""
        return self.head_size if self.mla is None else self.mla.rope_size

    def window(self, layer: int) -> int:
        """How many tokens a query of this layer sees: positions p - window + 1 to p; 0: all up to p."""
        return self.windows[layer] if self.windows else 0

    def kv_bytes_per_token(self, precision: str) -> int:
        """2 x layers x kv heads x head size x bytes per element; with `mla` the latent row is key and value at once.

        `precision` is the name of an `engine.precision.Precision`.
        """
        return page_bytes(self.groups, kept_in(precision), 1)

    def page_bytes(self, precision: str) -> int:
        """A page has a row of every layer, of those with a window, too."""
        return page_bytes(self.groups, kept_in(precision))

    @property
    def groups(self) -> tuple[Group, ...]:
        """What a page has of each layer, as `engine.capacity` counts it: rows for all of its tokens, windows or not."""
        query, mla = QueryHeads(self.heads), self.mla
        if mla is None:
            one = attention_group(query, KvHeads(self.kv_heads), self.head_size, self.head_size)
        else:
            one = latent_group(query, mla.kv_rank, mla.rope_size, mla.nope_size, mla.value_size)
        return (replace(one, layers=self.layers),)


@dataclass(frozen=True)
class BackendIdentity:
    """Everything besides the weights that can change a bit of the KV."""

    backend: str
    mode: str
    dtype: str
    page_layout: str
    instruction_set: str
    threads: int
    version: str


def fingerprint(file_digest: str, facts: ModelFacts, identity: BackendIdentity) -> bytes:
    """32 bytes that name one model on one backend; KV pages of different fingerprints never meet."""
    described = {"file": file_digest, "facts": _described(facts), "backend": asdict(identity)}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def _described(facts: ModelFacts) -> dict[str, Any]:
    """What a model has of the fields that not every model has is named; so a new field changes no old fingerprint."""
    plain = {field.name: field.default for field in fields(facts)}
    return {name: value for name, value in asdict(facts).items() if getattr(facts, name) != plain[name]}


def read_facts(file: GgufFile) -> ModelFacts:
    """Facts of a llama or qwen2 file. Raises ModelFileError when something is missing, absurd or contradictory."""
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelFileError(f"{file.path} holds a {arch!r} model; this engine runs {' and '.join(ARCHITECTURES)}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path} has no two-dimensional 'token_embd.weight'")
    heads = _integer(file, f"{arch}.attention.head_count", "heads")
    hidden = _integer(file, f"{arch}.embedding_length", "hidden")
    kv_heads = _integer(file, f"{arch}.attention.head_count_kv", "kv_heads", default=heads)
    if hidden % heads or heads % kv_heads:
        raise ModelFileError(f"{file.path}: {hidden} wide, {heads} heads and {kv_heads} kv heads do not divide")
    head_size = _integer(file, f"{arch}.attention.key_length", "hidden", default=hidden // heads)
    if head_size * heads != hidden or head_size % 2:
        raise ModelFileError(f"{file.path}: a head size of {head_size} with {heads} heads is not supported")
    facts = ModelFacts(
        name=str(meta.get("general.name", file.path.stem))[:200],
        arch=arch,
        layers=_integer(file, f"{arch}.block_count", "layers"),
        hidden=hidden,
        ffn=_integer(file, f"{arch}.feed_forward_length", "ffn"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=_integer(file, f"{arch}.context_length", "context"),
        vocab=embedding.shape[0],
        rope_base=_real(file, f"{arch}.rope.freq_base", 10_000.0),
        rope_scale=_rope_scale(file, arch),
        norm_eps=_real(file, f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
        tied_output="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        size_bytes=file.path.stat().st_size,
    )
    check_tensors(file, facts)
    return facts


def expected_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the architecture needs."""
    wide, kv_wide = facts.hidden, facts.kv_heads * facts.head_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (facts.vocab, wide), "output_norm.weight": (wide,)}
    if not facts.tied_output:
        shapes["output.weight"] = (facts.vocab, wide)
    per_layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (wide,),
        "attn_q.weight": (wide, wide),
        "attn_k.weight": (kv_wide, wide),
        "attn_v.weight": (kv_wide, wide),
        "attn_output.weight": (wide, wide),
        "ffn_norm.weight": (wide,),
        "ffn_gate.weight": (facts.ffn, wide),
        "ffn_up.weight": (facts.ffn, wide),
        "ffn_down.weight": (wide, facts.ffn),
    }
    if facts.qkv_bias:
        per_layer |= {"attn_q.bias": (wide,), "attn_k.bias": (kv_wide,), "attn_v.bias": (kv_wide,)}
    for layer in range(facts.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def check_tensors(file: GgufFile, facts: ModelFacts) -> None:
    """Raise ModelFileError for the first tensor that is missing, extra or of another shape."""
    expected = expected_shapes(facts)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{file.path}: tensor {name!r} is missing from a {facts.arch} model")
        if info.shape != shape:
            raise ModelFileError(
                f"{file.path}: {name!r} is {list(info.shape)}, a {facts.arch} model needs {list(shape)}"
            )
    extra = sorted(set(file.tensors) - set(expected) - {"rope_freqs.weight"})
    if extra or "rope_freqs.weight" in file.tensors:
        named = extra[0] if extra else "rope_freqs.weight"
        raise ModelFileError(f"{file.path}: tensor {named!r} is not part of the {facts.arch} models that are supported")


def _rope_scale(file: GgufFile, arch: str) -> float:
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelFileError(f"{file.path} scales its rope by {kind!r}; none and linear are supported")
    return _real(file, f"{arch}.rope.scaling.factor", 1.0) if kind == "linear" else 1.0


def _integer(file: GgufFile, key: str, kind: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if value is None:
        raise ModelFileError(f"{file.path}: metadata {key!r} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LIMITS[kind]:
        raise ModelFileError(f"{file.path}: metadata {key!r} is {value!r}; 1 to {_LIMITS[kind]} is possible")
    return value


def _real(file: GgufFile, key: str, default: float) -> float:
    metadata: Mapping[str, Any] = file.metadata
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelFileError(f"{file.path}: metadata {key!r} is {value!r}; a positive number is needed")
    return float(value)
