"""Weights in groups: what is kept of the file, and the panels that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from engine.errors import ModelError
from engine.gguf import GgufFile
from engine.quantised import GROUP, PANEL, WIDE_CODES, WIDE_SCALES, Groups, pack, quantise, read_groups
from tests.engine.conftest import load
from tests.engine.tiny import write_tiny

Array = np.ndarray[Any, np.dtype[Any]]
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q6_K": [208],
}  # where fp16 lie in a block


def random_blocks(kind: str, rows: int, columns: int) -> Array:
    """Any codes; scales and minimums between 2^-10 and 1."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (rows, columns // values, size), np.uint8)
    for at in HALVES[kind]:
        scale = (2.0 ** rng.uniform(-10, 0, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, kind: str, raw: Array) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q5_0", 8), ("Q8_0", 8)])
def test_a_files_own_codes_are_kept_to_the_last_bit(tmp_path: Path, kind: str, bits: int) -> None:
    raw = random_blocks(kind, 37, 512)
    with GgufFile(write(tmp_path / "x.gguf", kind, raw)) as file:
        groups = read_groups(file, "x.weight")
    assert groups.bits == bits
    assert np.array_equal(groups.values(), dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert groups.kind == (WIDE_CODES if bits == 8 else 0) | (WIDE_SCALES if kind == "Q4_K" else 0)


@pytest.mark.parametrize("kind", ["Q6_K", "F16", "F32"])
def test_what_has_other_groups_or_none_is_kept_within_half_a_step_of_8_bits(tmp_path: Path, kind: str) -> None:
    if kind == "Q6_K":
        raw = random_blocks(kind, 20, 512)
    else:
        raw = np.random.default_rng(1).standard_normal((20, 512)).astype("f2" if kind == "F16" else "f4")
    with GgufFile(write(tmp_path / "x.gguf", kind, raw)) as file:
        groups, values = read_groups(file, "x.weight"), file.tensor("x.weight")
    grouped = values.reshape(20, -1, GROUP)
    step = np.ptp(grouped, axis=2, keepdims=True) / 255
    assert (np.abs(groups.values().reshape(grouped.shape) - grouped) <= 0.5001 * step).all()


def test_a_group_of_one_value_keeps_it() -> None:
    values = np.repeat(np.array([[0.0, -3.1], [0.3, 0.0]], np.float32), 32, axis=1)
    assert np.array_equal(quantise(values).values(), values)


def test_rows_that_are_no_whole_number_of_groups_are_refused_by_name(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path / "x.gguf", "F32", np.zeros((4, 48), np.float32))) as file:
        with pytest.raises(ModelError, match=r"groups of 32; 'x.weight' has rows of 48"):
            read_groups(file, "x.weight")


def unpacked(panels: Array, kinds: Array, groups: int) -> Array:
    """[panels * 32, inputs]: what the panels mean, read element by element."""
    rows, at = [], 0
    for kind in kinds:
        values = np.zeros((PANEL, groups, GROUP))
        for g in range(groups):
            codes = 32 * (8 if kind & WIDE_CODES else 4) * 4
            scales = np.dtype(np.float32 if kind & WIDE_SCALES else np.float16)
            block = panels[at : at + codes + 64 * scales.itemsize]
            at += len(block)
            scale, minimum = np.frombuffer(block[codes:].tobytes(), scales).astype(np.float64).reshape(2, PANEL)
            for column in range(PANEL):
                for k in range(GROUP):
                    if kind & WIDE_CODES:
                        code = int(block[k // 4 * 128 + column * 4 + k % 4])
                    else:
                        code = int(block[k // 8 * 128 + column * 4 + k % 4]) >> 4 * (k // 4 % 2) & 15
                    values[column, g, k] = code * scale[column] + minimum[column]
        rows.append(values.reshape(PANEL, -1))
    assert at == len(panels)
    return np.concatenate(rows)


def random_groups(rows: int, kind: int, inputs: int = 64, seed: int = 0) -> Groups:
    rng = np.random.default_rng(seed)
    bits = 8 if kind & WIDE_CODES else 4
    codes = rng.integers(0, 1 << bits, (rows, inputs // GROUP, GROUP)).astype(np.uint8)
    exact = np.float32 if kind & WIDE_SCALES else np.float16
    scale, minimum = (rng.standard_normal((2, rows, inputs // GROUP)) / 9).astype(exact).astype(np.float32)
    return Groups(codes, scale, minimum, bits)


def meaning(groups: Groups) -> Array:
    values = groups.codes * groups.scale[..., None].astype(np.float64) + groups.minimum[..., None].astype(np.float64)
    return values.reshape(len(values), -1)


def test_panels_hold_the_codes_scales_and_minimums_of_all_kinds_of_rows() -> None:
    parts = [random_groups(rows, kind, seed=kind) for rows, kind in ((64, 0), (40, 1), (70, 2), (5, 3))]
    panels, kinds = pack(parts)
    assert kinds.tolist() == [0, 0, 1, 3, 2, 3]
    found = unpacked(panels, kinds, 2)
    assert np.array_equal(found[:179], np.concatenate([meaning(part) for part in parts]))
    assert not found[179:].any()


def test_a_gated_panel_holds_16_gates_and_the_16_ups_that_belong_to_them() -> None:
    gate, up = random_groups(48, 0), random_groups(48, 2, seed=1)
    panels, kinds = pack([gate, up], gated=True)
    assert kinds.tolist() == [2, 2, 2]
    for n, panel in enumerate(unpacked(panels, kinds, 2).reshape(3, 32, -1)):
        rows = slice(16 * n, 16 * n + 16)
        assert np.array_equal(panel, np.concatenate([meaning(gate)[rows], meaning(up)[rows]]))


def test_the_panels_of_a_model_hold_the_dequantised_weights_in_the_order_of_the_other_dtypes(tmp_path: Path) -> None:
    quants = {
        "attn_q": "Q4_1",
        "attn_k": "Q4_0",
        "attn_v": "Q8_0",
        "ffn_gate": "Q4_1",
        "ffn_up": "Q5_0",
        "ffn_down": "Q4_0",
    }
    loaded = load(write_tiny(tmp_path / "tiny.gguf", quants=quants))
    packed, plain = (loaded.weights(dtype, None).arrays for dtype in ("w4a8", "fp32"))
    qkv = unpacked(packed["0.qkv"], packed["0.qkv.kinds"], 2)
    assert np.allclose(qkv, plain["0.qkv"], rtol=1e-6, atol=1e-6)
    gate_up = unpacked(packed["1.gate_up"], packed["1.gate_up.kinds"], 2).reshape(-1, 2, 16, 64).swapaxes(0, 1)
    assert np.allclose(gate_up.reshape(192, 64), plain["1.gate_up"], rtol=1e-6, atol=1e-6)
    head = unpacked(packed["head"], packed["head.kinds"], 2)[: loaded.facts.vocab]
    assert np.abs(head - plain["embed"]).max() < np.abs(plain["embed"]).max() / 250
    assert packed["embed"].dtype == np.uint16
