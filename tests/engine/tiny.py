"""A tiny random model in a real GGUF file, so that everything but the weights' wisdom is real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, CONTEXT = 2, 64, 96, 2, 1, 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    shifted = (b for b in range(256) if b not in table)
    table |= {b: chr(256 + n) for n, b in enumerate(shifted)}
    return [table[b] for b in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    kinds = [3, 3, 3] + [1] * 256
    for merge in merges:
        tokens.append(merge.replace(" ", ""))
        kinds.append(1)
    return tokens, kinds, merges


def write_tiny(
    path: Path,
    *,
    arch: str = "llama",
    seed: int = 0,
    template: str = TEMPLATE,
    marks: Sequence[str] = (),
    **changes: Any,
) -> Path:
    """Write the model. `marks`: more control tokens. `changes`: metadata to override by key (dots as __), `tensors` to
    override by name, or `quants`: the type of the tensors whose names contain a word."""
    rng = np.random.default_rng(seed)
    tokens, kinds, merges = vocabulary()
    tokens, kinds = [*tokens, *marks], [*kinds, *[3] * len(marks)]
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items() if key not in ("tensors", "quants")}
    for key, value in values.items():
        writer.add_uint32(key, value)
    writer.add_float32(f"{arch}.rope.freq_base", 10_000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2" if arch == "qwen2" else "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.add_array("tokenizer.ggml.merges", merges)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_string("tokenizer.chat_template", template)
    tensors = _tensors(rng, len(tokens), arch)
    tensors |= changes.get("tensors", {})
    for name, value in tensors.items():
        _add(writer, name, value, changes.get("quants", {}))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any, quants: dict[str, str]) -> None:
    for word, quant in quants.items():
        if word in name and name.endswith("weight"):
            kind = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
            return
    writer.add_tensor(name, value)


def _tensors(rng: np.random.Generator, vocab: int, arch: str) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    kv_wide = KV_HEADS * HIDDEN // HEADS

    def matrix(rows: int, columns: int, scale: float = 0.25) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {"token_embd.weight": matrix(vocab, HIDDEN, 1.0), "output_norm.weight": ones.copy()}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        tensors |= {
            at + "attn_norm.weight": ones.copy(),
            at + "attn_q.weight": matrix(HIDDEN, HIDDEN),
            at + "attn_k.weight": matrix(kv_wide, HIDDEN),
            at + "attn_v.weight": matrix(kv_wide, HIDDEN),
            at + "attn_output.weight": matrix(HIDDEN, HIDDEN),
            at + "ffn_norm.weight": ones.copy(),
            at + "ffn_gate.weight": matrix(FFN, HIDDEN),
            at + "ffn_up.weight": matrix(FFN, HIDDEN),
            at + "ffn_down.weight": matrix(HIDDEN, FFN),
        }
        if arch == "qwen2":
            tensors |= {
                f"{at}attn_{c}.bias": matrix(1, w)[0] for c, w in (("q", HIDDEN), ("k", kv_wide), ("v", kv_wide))
            }
    return tensors
