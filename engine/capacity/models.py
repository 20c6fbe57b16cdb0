"""Whatever a person names as a model: a config.json, a directory with one, a GGUF file, a catalogue name, a pipe."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import IO, Final

from engine.capacity.facts import ModelFacts
from engine.capacity.read_config import MAX_BYTES, parse_config, read_config
from engine.capacity.read_gguf import MAGIC, gguf_facts, read_gguf
from engine.errors import PlanError

PIPE: Final = "-"
_REMOTE = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_facts(named: str, models_dir: Path, pipe: IO[bytes]) -> ModelFacts:
    """`models_dir` is where pulled models lie; `pipe` is read where the name is `-`. Raises PlanError."""
    if named == PIPE:
        return _piped(pipe)
    known = _catalogue()
    if named in known:
        pulled = models_dir / f"{named}.gguf"
        return read_gguf(pulled) if pulled.is_file() else read_config(known[named], named)
    path = Path(named).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PlanError("model", f"the directory {path} has no config.json")
        return _file(path / "config.json", path.resolve().name)
    if path.is_file():
        return _file(path, path.stem if path.stem != "config" else path.resolve().parent.name)
    if _REMOTE.fullmatch(named) and not named.endswith((".json", ".gguf")):
        raise PlanError(
            "model",
            f"{named} is not on this machine, and nothing is downloaded; its config is small: "
            f"curl -sL https://huggingface.co/{named}/resolve/main/config.json | tenuto plan -",
        )
    names = ", ".join(sorted(known))
    raise PlanError(
        "model", f"there is no file {named[:200]!r}; give a config.json, a GGUF file, a directory, - or {names}"
    )


def _file(path: Path, name: str) -> ModelFacts:
    try:
        with path.open("rb") as file:
            return _read(file, name, path.name)
    except OSError as error:
        raise PlanError("model", f"{path} cannot be read: {error.strerror or error}") from None


def _piped(pipe: IO[bytes]) -> ModelFacts:
    return _read(pipe, "", "standard input")


def _read(file: IO[bytes], name: str, place: str) -> ModelFacts:
    """By its first bytes, whatever it is called."""
    first = file.read(len(MAGIC))
    if first != MAGIC:
        return read_config(parse_config(first + file.read(MAX_BYTES + 1 - len(first)), place), name)
    begun = [first]
    return gguf_facts(place, lambda size: begun.pop() if begun else file.read(size))


def _catalogue() -> dict[str, dict[str, object]]:
    """Configs of the models that can be had from the package index, by name."""
    text = files("engine.capacity").joinpath("catalogue.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, object]] = json.loads(text)
    return found
