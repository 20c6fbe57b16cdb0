"""Evidence: one JSON object per line, every raw measurement, closed by a line that names the digest of the rest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def leave(path: Path, lines: Sequence[Line]) -> None:
    """Write the lines and their seal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(body + json.dumps({"kind": "seal", "sha256": _digest(body)}) + "\n")


def read(path: Path) -> tuple[list[Line], bool]:
    """The lines without the seal, and whether the seal fits them."""
    body, _, last = path.read_text().rstrip("\n").rpartition("\n")
    lines = [json.loads(line) for line in body.splitlines()]
    seal = json.loads(last)
    return lines, seal.get("kind") == "seal" and seal.get("sha256") == _digest(body + "\n")


def only(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def alter(path: Path, kind: str, field: str, factor: float) -> None:
    """Sabotage: make a measurement look better than it was, and leave the seal alone."""
    lines = path.read_text().splitlines()
    for index, text in enumerate(lines):
        line = json.loads(text)
        if line["kind"] == kind and isinstance(line.get(field), float):
            lines[index] = json.dumps({**line, field: line[field] * factor})
    path.write_text("\n".join(lines) + "\n")


def load_average() -> float:
    """Of the last minute: how busy the machine was with everything."""
    return round(os.getloadavg()[0], 2)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
