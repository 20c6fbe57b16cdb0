"""`python -m workflows.diagram`: draw the state machine into the README, from its table."""

from __future__ import annotations

import re
from pathlib import Path

from workflows.states import diagram


def main() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    drawn = re.sub(r"(```mermaid\n).*?(\n```)", lambda m: m[1] + diagram() + m[2], readme.read_text(), flags=re.DOTALL)
    readme.write_text(drawn)


if __name__ == "__main__":
    main()
