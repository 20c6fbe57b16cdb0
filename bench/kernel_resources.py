"""What a compiled kernel takes: registers, shared memory, spills, and the classes of instructions in it.

Triton does not refuse what a target cannot launch, and a kernel that spills its registers still computes the right
numbers, so both are read from what was compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_CLASSES = (
    "mma.sync",
    "wgmma.mma_async",
    "tcgen05.mma",
    "cp.async",
    "ld.global.v4",
    "v_mfma",
    "global_load_dwordx4",
    "buffer_load_dwordx4",
)


@dataclass(frozen=True)
class Resources:
    """`spills`: instructions that move registers to memory and back, or dwords of them on AMD."""

    registers: int
    shared_bytes: int
    spills: int
    instructions: tuple[str, ...]


def resources(compiled: Any, kept: Path) -> Resources:
    """Of a kernel as `warmup` returns it; what was read once is kept in that directory, by Triton's own key."""
    path = kept / f"resources-{compiled.hash}.json"
    if path.is_file():
        fields = json.loads(path.read_text())
        return Resources(**{**fields, "instructions": tuple(fields["instructions"])})
    found = _read(compiled)
    kept.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(asdict(found)))
    new.rename(path)
    return found


def _read(compiled: Any) -> Resources:
    assembly: Mapping[str, Any] = compiled.asm
    shared = int(compiled.metadata.shared)
    if "cubin" not in assembly:
        return _amd(str(assembly["amdgcn"]), shared)
    registers, stack, sass = _dumped(assembly["cubin"])
    moves = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    # A stack frame with no such instruction still is memory that some register was put in.
    return Resources(registers, shared, moves or int(stack > 0), classes(str(assembly["ptx"])))


def classes(text: str) -> tuple[str, ...]:
    return tuple(name for name in _CLASSES if name in text)


def _dumped(cubin: bytes) -> tuple[int, int, str]:
    """Registers, bytes of stack and the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [str(_TOOL), "-res-usage", "-sass", file.name]
        text = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{_TOOL} names no registers: {text[-200:]}")
    return int(found[1]), int(found[2]), text


def _amd(text: str, shared: int) -> Resources:
    """Spilled scalar registers go to lanes of vector registers, not to memory, and are not counted."""
    spills = _note(text, "vgpr_spill_count") or int(_note(text, "private_segment_fixed_size") > 0)
    return Resources(_note(text, "vgpr_count"), shared, spills, classes(text))


def _note(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    if found is None:
        raise RuntimeError(f"the kernel's notes have no {name}")
    return int(found[1])
