"""Files from anywhere: a damaged or hostile one gives a sentence."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.facts import read_facts
from engine.gguf import GgufFile
from engine.tokens import load_tokenizer
from tests.engine.tiny import HIDDEN, write_tiny


def read(path: Path) -> None:
    with GgufFile(path) as file:
        read_facts(file)
    load_tokenizer(path)


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_a_whole_file_says_what_it_holds(tiny_path: Path) -> None:
    with GgufFile(tiny_path) as file:
        facts = read_facts(file)
    assert (facts.arch, facts.layers, facts.heads, facts.kv_heads, facts.head_size) == ("llama", 2, 2, 1, 32)
    assert facts.tied_output
    assert facts.kv_bytes_per_token("bf16") == 2 * 2 * 2 * 16 * 2


def test_every_truncation_is_a_sentence(tiny_path: Path, tmp_path: Path) -> None:
    whole = tiny_path.read_bytes()
    for size in [0, 1, 3, 4, 7, 8, 15, 23, 24, 25, 40, 100, 1000, 5000, len(whole) // 2, len(whole) - 4096]:
        with pytest.raises(ModelFileError, match=r"cut short|empty|does not start"):
            read(write(tmp_path, whole[:size]))


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not start with 'GGUF'"):
        read(write(tmp_path, b"PK\x03\x04" + b"\0" * 100))
    with pytest.raises(ModelFileError, match="cannot be read"):
        read(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_an_unknown_version_is_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(ModelFileError, match="version"):
        read(write(tmp_path, b"GGUF" + struct.pack("<IQQ", version, 0, 0)))


@pytest.mark.parametrize(("tensors", "keys"), [(2**63, 0), (0, 2**63), (10**6, 1), (1, 10**6)])
def test_absurd_counts_are_refused_before_anything_is_allocated(tmp_path: Path, tensors: int, keys: int) -> None:
    with pytest.raises(ModelFileError, match="more than"):
        read(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"\0" * 64))


def test_an_absurd_string_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="more than"):
        read(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"\0" * 64))


def test_arrays_in_arrays_in_arrays_are_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    nested = struct.pack("<IQ", 9, 1) * 50
    with pytest.raises(ModelFileError, match="unknown value type"):
        read(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + nested + b"\0" * 64))


def test_a_tensor_beyond_the_end_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    whole = bytearray(tiny_path.read_bytes())
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4  # its offset field
    whole[at : at + 8] = struct.pack("<Q", 2**40)
    with pytest.raises(ModelFileError, match=r"'output_norm\.weight' would end at byte"):
        read(write(tmp_path, bytes(whole)))


def test_an_unsupported_tensor_type_is_named(tiny_path: Path, tmp_path: Path) -> None:
    whole = bytearray(tiny_path.read_bytes())
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    whole[at : at + 4] = struct.pack("<I", 99)
    with pytest.raises(ModelFileError, match="unsupported tensor type 99"):
        read(write(tmp_path, bytes(whole)))


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    wrong = {"blk.1.ffn_up.weight": np.zeros((HIDDEN, HIDDEN), np.float32)}
    path = write_tiny(tmp_path / "wrong.gguf", tensors=wrong)
    with pytest.raises(ModelFileError, match=r"'blk.1.ffn_up.weight' is \[64, 64\], a llama model needs \[96, 64\]"):
        read(path)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "extra.gguf", tensors={"blk.0.mystery": np.zeros(32, np.float32)})
    with pytest.raises(ModelFileError, match=r"'blk.0.mystery' is not part"):
        read(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"llama__attention__head_count": 5}, "do not divide"),
        ({"llama__attention__head_count_kv": 3}, "do not divide"),
        ({"llama__attention__head_count": 0}, "1 to"),
        ({"llama__block_count": 3}, "'blk.2.attn_norm.weight' is missing"),
        ({"llama__block_count": 100_000}, "1 to 512"),
        ({"llama__attention__key_length": 8}, "head size of 8"),
    ],
)
def test_contradictions_in_the_metadata_are_sentences(tmp_path: Path, change: dict[str, int], told: str) -> None:
    with pytest.raises(ModelFileError, match=told):
        read(write_tiny(tmp_path / "odd.gguf", **change))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds a 'gemma' model; this engine runs llama and qwen2"):
        read(write_tiny(tmp_path / "gemma.gguf", arch="gemma"))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 7000), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_in_the_header_never_give_anything_but_a_sentence(
    tiny_path: Path, tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    whole = bytearray(tiny_path.read_bytes())
    for at, value in flips:
        whole[at] = value
    with contextlib.suppress(ModelFileError):  # anything else fails the test
        read(write(tmp_path, bytes(whole)))
