"""Evidence made by hand, in which every bar is reached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

INFO = "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VBMI = 1 | AVX512_VNNI = 1 | AVX512_BF16 = 1 |"
FLAGS = "fpu avx2 avx512f avx512_vbmi avx512_vnni avx512_bf16"
COLUMNS = ("prefill_512", "prefill_2048", "decode_128", "decode_2048", "batch8")
# tokens per second in every column
RATES = {"ours/bf16": 120.0, "ours/w4a8": 400.0, "llama.cpp/bf16": 100.0, "llama.cpp/q8_0": 125.0}
MATRIX_BYTES = 100_000_000


def peer_line(name: str, info: str = INFO, flash: str = "enabled") -> dict[str, Any]:
    return {"kind": "engine", "name": name, "cpu_flags": FLAGS, "system_info": info, "flash_attn": flash}


def engine_lines(rates: dict[str, float] = RATES, rounds: int = 7) -> list[dict[str, Any]]:
    """A run in which every engine has one rate; the odd rounds were run on a machine that was half as fast."""
    lines: list[dict[str, Any]] = [{"kind": "about", "peer": "llama.cpp", "quick": False, "matrix_bytes": MATRIX_BYTES}]
    lines += [peer_line(name) for name in rates if name.startswith("llama.cpp/")]
    for number in range(rounds):
        pace = 0.5 if number % 2 else 1.0
        reads = {"stream": 13e9 * pace, "matrices": 12e9 * pace}
        lines += [{"kind": "bandwidth", "round": number, "read": k, "bytes_per_s": v} for k, v in reads.items()]
        for engine, rate in rates.items():
            lines += [_timing(number, engine, column, rate * pace) for column in COLUMNS]
    lines += [_rows(engine) for engine in rates if engine.startswith("ours/")]
    for repeat in range(3):
        for window, gap in (("calm", 20.0), ("beside", 30.0)):
            gaps = [gap] * 95 + [gap * 10] * 5
            lines.append({"kind": "gaps", "dtype": "bf16", "repeat": repeat, "window": window, "gaps_ms": gaps})
    return lines


def _timing(number: int, engine: str, column: str, rate: float) -> dict[str, Any]:
    rows = ["aa", "bb"] if engine.startswith("ours/") else ["cc", "dd"]
    made = {"kind": "timing", "round": number, "engine": engine, "column": column}
    return {**made, "seconds": 100 / rate, "tokens": 100, "rows": rows, "foreign_cores": 0.05}


def _rows(engine: str) -> dict[str, Any]:
    return {"kind": "alone", "engine": engine, "column": "batch8", "rows": ["aa", "bb"]}


def verified(directory: Path) -> tuple[int, dict]:
    """Exit status and figures of `bench.verify`."""
    command = [sys.executable, "-m", "bench.verify", str(directory)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode, json.loads(answer.stdout)
