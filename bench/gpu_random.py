"""A random llama, made on the spot: in memory, or as a GGUF file with a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.facts import ModelFacts
from engine.tokens.vocabulary import byte_of
from engine.weights import Weights

Array = np.ndarray[Any, np.dtype[Any]]

_DRAWN = 1_000_003  # a prime: rows of a matrix that repeats so many numbers all differ
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    context: int
    vocab: int = 260

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


TINY = Shape(2, 64, 96, 2, 1, 512)
SMALL = Shape(8, 1024, 2816, 8, 4, 8192)
LARGE = Shape(16, 2048, 8192, 16, 8, 40_960, vocab=32_000)


def facts_of(shape: Shape) -> ModelFacts:
    return ModelFacts(
        name="a random llama", arch="llama", layers=shape.layers, hidden=shape.hidden, ffn=shape.ffn,
        heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, context=shape.context,
        vocab=shape.vocab, rope_base=500_000.0, rope_scale=1.0, norm_eps=1e-5, tied_output=True, qkv_bias=False,
        size_bytes=0,
    )  # fmt: skip


def weights_of(shape: Shape, seed: int = 0) -> Weights:
    """In bf16, as the engine multiplies them."""
    drawn = np.random.default_rng(seed).standard_normal(_DRAWN).astype(np.float32) * 0.02
    bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    ones = np.ones(shape.hidden, np.float32)

    def matrix(rows: int, columns: int) -> Array:
        return np.resize(bits, (rows, columns))

    arrays: dict[str, Array] = {"embed": matrix(shape.vocab, shape.hidden), "norm": ones}
    for layer in range(shape.layers):
        arrays |= {
            f"{layer}.attn_norm": ones,
            f"{layer}.qkv": matrix(width, shape.hidden),
            f"{layer}.o": matrix(shape.hidden, shape.hidden),
            f"{layer}.ffn_norm": ones,
            f"{layer}.gate_up": matrix(2 * shape.ffn, shape.hidden),
            f"{layer}.down": matrix(shape.hidden, shape.ffn),
        }
    return Weights("bf16", arrays)


def write_model(path: Path, shape: Shape, seed: int = 0) -> Path:
    """A GGUF file in F16. The vocabulary is three special tokens, the bytes and a pair of them."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("block_count", shape.layers),
        ("context_length", shape.context),
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.ffn),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    alphabet = byte_of()
    tokens = [*_SPECIAL, *sorted(alphabet, key=alphabet.__getitem__), "he"]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3] * len(_SPECIAL) + [1] * 257)
    writer.add_array("tokenizer.ggml.merges", ["h e"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_string("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in _tensors(shape, len(tokens), np.random.default_rng(seed)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(shape: Shape, vocab: int, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    hidden, wide = shape.hidden, shape.kv_heads * shape.head_size

    def matrix(rows: int, columns: int) -> Array:
        drawn: Array = rng.standard_normal((rows, columns), dtype=np.float32) * hidden**-0.5
        return drawn.astype(np.float16)

    ones = np.ones(hidden, np.float32)
    yield "token_embd.weight", matrix(vocab, hidden) * np.float16(hidden**0.5)
    yield "output_norm.weight", ones
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", ones
        yield at + "ffn_norm.weight", ones
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", wide, hidden),
            ("attn_v", wide, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", shape.ffn, hidden),
            ("ffn_up", shape.ffn, hidden),
            ("ffn_down", hidden, shape.ffn),
        ):
            yield f"{at}{name}.weight", matrix(rows, columns)
