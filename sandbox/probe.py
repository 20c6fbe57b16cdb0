"""`python3 -m sandbox.probe`: says which sandbox backend will be used and why; exit code 1 where none can run."""

from __future__ import annotations

import sys

from .choose import Choice, choose
from .errors import BadSpec


def probe(prefer: str | None = None) -> Choice:
    """A quick look, before anything large is downloaded. Changes nothing."""
    return choose(prefer)


def main(arguments: list[str]) -> int:
    """Takes the name of a backend, to ask about that one alone."""
    try:
        choice = probe(arguments[0] if arguments else None)
    except BadSpec as error:
        print(error, file=sys.stderr)
        return 2
    print(choice.sentence(), file=sys.stdout if choice.backend else sys.stderr)
    return 0 if choice.backend else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
