"""python -m engine.native DIR: build the kernels into DIR ahead of the first start, and say how it went."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.errors import BackendUnavailable
from engine.native import Library, build


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m engine.native DIR", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    try:
        library = Library(build(directory, _progress))
    except BackendUnavailable as reason:
        print(f"kernels: {reason}. The engine will run on torch, several times slower.")
        return 0
    print(f"kernels: ready for {library.best_instruction_set} in {directory}")
    return 0


def _progress(done: float) -> None:
    if done == 0.0:
        print("kernels: building, some seconds", flush=True)


if __name__ == "__main__":
    sys.exit(main())
