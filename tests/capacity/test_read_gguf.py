"""The header of a GGUF file is enough, wherever it comes from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from engine.capacity import ModelFacts, PlanError, kv_bytes_per_token, model_facts
from engine.capacity.read_gguf import QUANTS

LAYERS, HIDDEN, FFN, VOCAB = 4, 64, 96, 100


def write(path: Path, arch: str = "llama", **more: Any) -> Path:
    """A small file: one tensor table, and the metadata of an architecture."""
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "context_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    } | more
    for key, value in numbers.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes[f"blk.{layer}.attn_q.weight"] = (HIDDEN, HIDDEN)
        shapes[f"blk.{layer}.ffn_up.weight"] = (FFN, HIDDEN)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> ModelFacts:
    return model_facts(str(path), path.parent, io.BytesIO())


def test_the_table_of_formats_is_that_of_ggml() -> None:
    assert {one: sizes for one, (_, *sizes) in QUANTS.items()} == {one: [*GGML_QUANT_SIZES[one]] for one in QUANTS}


def test_a_file_and_the_same_one_in_a_pipe_are_one_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    found = read(path)
    assert found.parameters.total == VOCAB * HIDDEN + HIDDEN + LAYERS * (HIDDEN * HIDDEN + FFN * HIDDEN)
    assert found.file_bytes == 2 * found.parameters.total
    assert kv_bytes_per_token(found.groups, "bf16") == 2 * LAYERS * 2 * 16 * 2
    cut = path.read_bytes()[:4096]  # the tensors themselves are not needed
    assert model_facts("-", tmp_path, io.BytesIO(cut)).groups == found.groups


def test_heads_that_differ_by_layer_and_windows_are_counted(tmp_path: Path) -> None:
    varied = read(write(tmp_path / "a.gguf", **{"attention.head_count_kv": [1, 2, 4, 1]}))
    assert kv_bytes_per_token(varied.groups, "bf16") == 2 * (1 + 2 + 4 + 1) * 16 * 2
    windowed = read(write(tmp_path / "b.gguf", "gemma2", **{"attention.sliding_window": 128}))
    assert sorted((one.kind, one.layers) for one in windowed.groups) == [("growing", 2), ("windowed", 2)]


@pytest.mark.parametrize(
    ("arch", "more", "key"),
    [
        ("rwkv6", {}, "general.architecture"),
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"block_count": 0}, "block_count"),
        ("llama", {"attention.head_count_kv": 3}, "attention.head_count"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "attention.head_count_kv"),
        ("llama", {"expert_count": 4, "expert_used_count": 5}, "expert_used_count"),
    ],
)
def test_what_is_wrong_in_a_header_is_named(tmp_path: Path, arch: str, more: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError) as error:
        read(write(tmp_path / "m.gguf", arch, **more))
    assert error.value.key == key


def test_a_header_that_is_cut_short_is_refused_at_any_byte(tmp_path: Path) -> None:
    data = write(tmp_path / "m.gguf").read_bytes()
    for size in range(4, 600, 7):
        with pytest.raises(PlanError, match="cut short"):
            model_facts("-", tmp_path, io.BytesIO(data[:size]))
