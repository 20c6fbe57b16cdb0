"""The header of a GGUF file as `ModelFacts`: a few megabytes at its front, piped or from a disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from engine.capacity.facts import (
    Experts,
    Group,
    KvHeads,
    ModelFacts,
    Parameters,
    QueryHeads,
    attention_group,
    grouped,
    latent_group,
)
from engine.capacity.keys import Keys
from engine.errors import ModelFileError, PlanError
from engine.ggufheader import Entry, Header, count_of, read_header

MAGIC: Final = b"GGUF"
_MOST_BYTES: Final = 256 << 20
# id -> (name, values per block, bytes per block), as ggml has them
QUANTS: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    26: ("I32", 1, 4),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_PLAIN: Final = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "mistral3", "phi3", "gemma")
_WINDOWED: Final = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # every so-manieth layer sees everything
_LATENT: Final = ("deepseek2",)
_KINDS: Final = (
    (r"token_embd\.weight", "embedding"),
    (r"output\.weight", "head"),
    (r".*_exps(\.weight|\.bias)", "experts"),
    (r".*(ffn_gate_inp|exp_probs_b).*", "router"),
    (r".*(norm|rope_).*", "norm"),
    (r".*attn.*", "attention"),
    (r".*ffn.*", "mlp"),
)


def read_gguf(path: Path) -> ModelFacts:
    """Of a file. Raises PlanError."""
    try:
        with path.open("rb") as file:
            return gguf_facts(path.name, file.read)
    except OSError as error:
        raise PlanError(str(path), f"it cannot be read: {error.strerror or error}") from None


def gguf_facts(name: str, read: Callable[[int], bytes]) -> ModelFacts:
    """Of whatever gives the next so many bytes. Raises PlanError."""
    left = _MOST_BYTES

    def take(size: int) -> bytes:
        nonlocal left
        left -= size
        if left < 0:
            raise PlanError(name, f"its header has more than {_MOST_BYTES} bytes, which is not sensible")
        return read(size)

    try:
        header = read_header(name, take, QUANTS)
    except ModelFileError as error:
        raise PlanError("model", str(error)) from None
    return _facts(name, header)


def _facts(name: str, header: Header) -> ModelFacts:
    meta = header.metadata
    arch = meta.get("general.architecture")
    known = (*_PLAIN, *_WINDOWED, *_LATENT)
    if arch not in known:
        raise PlanError("general.architecture", f"{str(arch)[:60]!r} is not known; known are {', '.join(known)}")
    keys = Keys({key.removeprefix(f"{arch}."): value for key, value in meta.items()})
    layers = keys.integer("block_count", "layers") - keys.integer("nextn_predict_layers", "layers", 0, least=0)
    entries = _once(name, header.entries)
    embedding = entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise PlanError("token_embd.weight", "the file has no such table")
    vocab, hidden = embedding.shape
    query = QueryHeads(_of_layers(keys, "attention.head_count", layers)[0])
    groups, kept = _latent(keys, query, layers) if arch in _LATENT else _attention(arch, keys, query, hidden, layers)
    ffn = keys.config.get("feed_forward_length")
    degrees = [("attention.head_count", query.count)]
    if isinstance(ffn, int) and ffn > 0 and not isinstance(ffn, bool):
        degrees.append(("feed_forward_length", ffn))
    said = meta.get("general.name")
    return ModelFacts(
        name=said[:200] if isinstance(said, str) and said else name,
        family=str(arch),
        layers=layers,
        hidden=hidden,
        query_heads=query,
        kv_heads=kept,
        context=keys.integer("context_length", "context"),
        vocab=vocab,
        groups=groups,
        parameters=_parameters(entries.values()),
        experts=_experts(keys, entries, hidden),
        degrees=tuple(degrees),
        weights="bf16",
        file_bytes=sum(one.size_bytes for one in entries.values()),
        assumed=tuple(one for one in keys.assumed if not one.startswith("nextn")),
    )


def _once(name: str, entries: Iterable[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for one in entries:
        if one.name in found:
            raise PlanError("model", f"{name} holds {one.name[:60]!r} twice")
        found[one.name] = one
    return found


def _attention(arch: str, keys: Keys, query: QueryHeads, hidden: int, layers: int) -> tuple[tuple[Group, ...], KvHeads]:
    kept = _of_layers(keys, "attention.head_count_kv", layers, query.count)
    if not keys.has("attention.key_length") and hidden % query.count:
        raise PlanError("embedding_length", f"{hidden} cannot be divided by attention.head_count {query.count}")
    plain = {"attention.key_length": hidden // query.count, "attention.value_length": hidden // query.count}
    sizes = Keys(plain | {key: keys.config[key] for key in plain if keys.has(key)})
    key_size, value_size = (sizes.integer(key, "size") for key in plain)
    for one in kept:
        if query.count % one:
            raise PlanError("attention.head_count", f"{query.count} cannot be divided by {one} KV heads")
    every = _WINDOWED.get(arch)
    window = (
        keys.integer("attention.sliding_window", "context") if every and keys.has("attention.sliding_window") else 0
    )
    single = [
        attention_group(query, KvHeads(one), key_size, value_size, window if every and (at + 1) % every else 0)
        for at, one in enumerate(kept)
    ]
    return grouped(single), KvHeads(min(kept))


def _latent(keys: Keys, query: QueryHeads, layers: int) -> tuple[tuple[Group, ...], KvHeads]:
    rank, rope = keys.integer("attention.kv_lora_rank", "size"), keys.integer("rope.dimension_count", "size")
    mla = keys.has("attention.key_length_mla")  # newer files say what a latent row unpacks to under other names
    whole = keys.integer("attention.key_length_mla" if mla else "attention.key_length", "size")
    value = keys.integer("attention.value_length_mla" if mla else "attention.value_length", "size")
    if whole <= rope:
        raise PlanError("attention.key_length", f"{whole} leaves nothing beside the {rope} of rope.dimension_count")
    one = latent_group(query, rank, rope, whole - rope, value)
    return grouped([one] * layers), KvHeads(1)


def _of_layers(keys: Keys, key: str, layers: int, default: int | None = None) -> list[int]:
    """A number for each layer, which files write once where all are alike."""
    value = keys.config.get(key)
    if not isinstance(value, list):
        return [keys.integer(key, "heads", default)] * layers
    if len(value) != layers:
        raise PlanError(key, f"it has {len(value)} entries, the model {layers} layers")
    return [Keys({key: one}).integer(key, "heads") for one in value]


def _experts(keys: Keys, entries: Mapping[str, Entry], hidden: int) -> Experts | None:
    if not keys.config.get("expert_count"):
        return None
    count, active = keys.integer("expert_count", "experts"), keys.integer("expert_used_count", "experts")
    if active > count:
        raise PlanError("expert_used_count", f"{active} is more than the {count} of expert_count")
    layers = sum(bool(re.fullmatch(r"blk\.\d+\.ffn_down_exps\.weight", name)) for name in entries)
    return Experts(count, active, max(1, layers), hidden)


def _parameters(entries: Iterable[Entry]) -> Parameters:
    counts: dict[str, Any] = {}
    for one in entries:
        kind = next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, one.name)), "mixer")
        counts[kind] = counts.get(kind, 0) + count_of(one.shape)
    return Parameters(**counts)
