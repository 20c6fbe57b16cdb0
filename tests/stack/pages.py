"""README.md and docs/*.md taken apart: fenced blocks, and the commands in those for a shell."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(
    r"(?:^<!-- test: (?P<note>.*) -->\n)?^(?P<indent> *)```(?P<language>[^`\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Block:
    """A fenced block. `note`: what a hidden comment before it says of how it is tested."""

    page: str
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        page = str(path.relative_to(ROOT))
        yield Block(page, line, found["language"].strip(), found["text"], found["note"] or "")


ALL = tuple(block for path in PAGES for block in blocks(path))


def in_language(*languages: str) -> list[Block]:
    return [block for block in ALL if block.language in languages]


def commands(block: Block) -> Iterator[str]:
    """Whole commands, over as many lines as each takes; of a `console` block those behind `$`, not the output."""
    lines = iter(block.text.splitlines())
    for line in lines:
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while not _is_whole(line):
            line += "\n" + next(lines)
        yield line


def _is_whole(command: str) -> bool:
    first, *rest = command.split("\n")
    if here := HEREDOC.search(first):
        return here[2] in rest
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation that goes on
        return False
    return not command.endswith("\\")


def output(block: Block) -> str:
    """What a `console` block shows behind its command."""
    return "\n".join(line for line in block.text.splitlines() if not line.startswith("$ "))


def objects(block: Block) -> Iterator[dict[str, Any]]:
    """The JSON objects of a block, one after the other. Raises ValueError where something else stands there."""
    text = block.text.strip()
    while text:
        found, end = json.JSONDecoder().raw_decode(text)
        yield found
        text = text[end:].lstrip()
