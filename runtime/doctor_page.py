"""`python -m runtime.doctor_page`: what the doctor can find, written to docs/doctor.md from the findings themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.doctor import KNOWN, PARTS
from runtime.bundle import WHAT

OUT: Final = Path(__file__).parents[1] / "docs" / "doctor.md"
_PARTS: Final = {
    "memory": "Where the memory went: predicted against measured. Failing at the start is arithmetic and happens every"
    " time; failing under load is growth. It is the one part that works without an engine: it reads how the last start"
    " ended (`logs/engine.death.json` in the home), and `tenuto doctor memory` does so itself where nothing answers.",
    "pool": "Requests wait while fewer run than may: they wait for pages. Each of six remedies is told with what it"
    " would bring this load, in the order of what it costs; those that bring nothing here come last.",
    "tail": "The median of intervals between tokens is flat and some are many times as long. Every long wait is taken"
    " apart when it ends (`GET /v1/admin/engines/{node_id}/spans`, `waits`); the suspects are gone through in the order"
    " below, and those that are ruled out are said as well. Three long waits in ten minutes are the least.",
    "precision": "What binds this load: bytes of weights, bytes of KV, or products; and the format that helps it. Only"
    " where requests wait is it a finding. Run the evals that it names after any change.",
    "speculation": "With acceptance a, a pass of k drafts brings (1 - a^(k+1)) / (1 - a) tokens; it takes a decode step"
    " and, of each request of the batch, k tokens more. The best k follows from what was measured.",
}

_INTRO: Final = """\
`tenuto doctor` looks at every node; `tenuto doctor memory`, `pool`, `tail`, `precision` and `speculation` at one part
of it (`--node`, `--json`; `GET /v1/admin/doctor?part=&node=`). A finding has evidence, a cause and remedies, the best
first. critical: nothing runs, or soon nothing will; warning: somebody waits for it; advice: it could be better. The
exit status is 1 where something is critical or a warning. A healthy node has no findings."""
_BUNDLE: Final = """\
`tenuto doctor bundle --out FILE` writes a tar.gz for whoever helps you. Nothing of what sessions say is in it, no
token ids, no keys and no secrets: logs are scrubbed line by line, and every secret that the installation knows is taken
out of all of it. `manifest.json` lists each file with its sha256, and what could not be had."""


def document() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# The doctor"
    yield ""
    yield from _INTRO.splitlines()
    yield ""
    yield "This page is written from `engine/doctor/findings.py` by `python -m runtime.doctor_page`."
    for part in PARTS:
        yield ""
        yield f"## {part}"
        yield ""
        yield _PARTS[part]
        yield ""
        yield "| finding | | what it means | evidence | what to do |"
        yield "|---|---|---|---|---|"
        for name, known in KNOWN.items():
            if name.startswith(f"{part}."):
                evidence = ", ".join(f"`{one}`" for one in known.evidence)
                yield f"| `{name}` | {known.severity} | {known.means} | {evidence} | {known.do} |"
    yield ""
    yield "## The bundle"
    yield ""
    yield from _BUNDLE.splitlines()
    yield ""
    yield "| file | |"
    yield "|---|---|"
    for name, what in WHAT.items():
        yield f"| `{name}` | {what} |"
    yield "| `logs/NAME.log` | the end of the log of each process, scrubbed |"


def main() -> None:
    OUT.write_text(document())


if __name__ == "__main__":
    main()
