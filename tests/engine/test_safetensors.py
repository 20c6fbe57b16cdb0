"""Safetensors files, whole, torn and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelFileError
from engine.safetensors import SafetensorsFile


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_tensors_of_every_type_are_read_as_the_reference_wrote_them(tmp_path: Path) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    kinds = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16}
    save_file({name: values.to(kind) for name, kind in kinds.items()}, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, kind in kinds.items():
        assert np.array_equal(file.tensor(name), values.to(kind).float().numpy())
    file.close()


@pytest.mark.parametrize(
    ("header", "body", "told"),
    [
        (b"not json", b"", "its header is no JSON"),
        (b"[" * 100_000, b"", "its header is no JSON"),
        ([], b"", "no table of tensors"),
        (b'{"a": {}, "a": {}}', b"", "it names something twice"),
        ({"a": entry(0, 8)}, bytes(4), "is cut short: its tensors would end at byte"),
        ({"a": entry(0, 8)}, bytes(12), "has 4 bytes that belong to no tensor"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "'b' does not begin where the tensor before it ends"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "'b' does not begin where the tensor before it ends"),
        ({"a": entry(0, 8, [3])}, bytes(8), r"'a' of shape \[3\] needs 12 bytes and has 8"),
        ({"a": entry(0, 8, [2**40, 2**40, 2**40])}, bytes(8), "needs .* bytes and has 8"),
        ({"a": entry(0, 8, [-2])}, bytes(8), "impossible shape or place"),
        ({"a": entry(0, 8, [True, 2])}, bytes(8), "impossible shape or place"),
        ({"a": {**entry(0, 8), "data_offsets": [0]}}, bytes(8), "impossible shape or place"),
        ({"a": {**entry(8, 16), "data_offsets": [8, 0]}}, bytes(8), "needs 8 bytes and has -8"),
        ({"a": entry(0, 8, [8], "F8_E4M3")}, bytes(8), "of the type 'F8_E4M3'; F32, F16, BF16 are supported"),
        ({"a": 1}, b"", "of the type None"),
    ],
)
def test_what_is_not_a_whole_file_is_a_sentence(tmp_path: Path, header: Any, body: bytes, told: str) -> None:
    path = write(tmp_path / "x.safetensors", header, body)
    with pytest.raises(ModelFileError, match=told) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"abc", "it ends inside its header"),
        ((2**63).to_bytes(8, "little") + b"{}", "it ends inside its header"),
        ((100).to_bytes(8, "little") + b"{}", "it ends inside its header"),
    ],
)
def test_a_file_that_ends_in_its_header_is_a_sentence(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match=told):
        SafetensorsFile(tmp_path / "x.safetensors")
