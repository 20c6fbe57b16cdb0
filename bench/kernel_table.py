"""The compile gate's lines judged, and as a table: kernel, targets, registers, shared memory, spills, worst error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.evidence import Line
from bench.kernel_known import Finding, Kind
from bench.kernel_targets import TARGETS


def findings(line: Line) -> list[Finding]:
    """What is wrong with one sample on one target."""
    found: list[tuple[Kind, str]] = []
    if line["refused"]:
        found.append(("refused", line["refused"]))
    if line["failed"]:
        found.append(("failed", line["failed"]))
    limit = TARGETS[line["target"]].shared_bytes
    for one in line["compiled"]:
        if one["spills"]:
            found.append(("spill", f"{one['name']} spills {one['spills']} times, {one['registers']} registers"))
        if one["shared_bytes"] > limit:
            found.append(("smem", f"{one['name']} wants {one['shared_bytes']} B of shared memory, {limit} B are there"))
    found += [("instruction", f"no {wanted} in what was compiled") for wanted in line["missing"]]
    found += [("fusion", f"the launch of {name} does not say enable_fp_fusion") for name in line["unsaid"]]
    version = ".".join(line["triton"].split(".")[:2])
    return [Finding(line["kernel"], line["sample"], line["target"], kind, version, text) for kind, text in found]


def kernels(lines: Iterable[Line]) -> set[str]:
    """Whole steps are none."""
    return {line["kernel"] for line in lines if not line["kernel"].startswith("(")}


def compiled(lines: Sequence[Line], target: str) -> int:
    """How many kernels compile for this target: every sample that the launch does not refuse, and one at least."""
    here = [line for line in lines if line["target"] == target]
    return len(kernels(x for x in here if x["compiled"]) - {x["kernel"] for x in here if x["failed"]})


def table(lines: Sequence[Line], errors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`errors`: by kernel, the interpreter's `worst` and the `bound` of the sample that comes closest to its own."""
    targets = [target for target in TARGETS if any(line["target"] == target for line in lines)]
    heads = ["kernel", "targets", *(f"regs {t}" for t in targets), *(f"KiB {t}" for t in targets), "spills", "worst"]
    rows = [_row(kernel, lines, targets, errors.get(kernel)) for kernel in dict.fromkeys(x["kernel"] for x in lines)]
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)]


def _row(kernel: str, lines: Sequence[Line], targets: Sequence[str], error: Mapping[str, Any] | None) -> list[str]:
    by_target = {t: [x for x in lines if x["kernel"] == kernel and x["target"] == t] for t in targets}
    built = [
        t for t, ones in by_target.items() if any(x["compiled"] for x in ones) and not any(x["failed"] for x in ones)
    ]
    spills = sum(_most(ones, "spills") or 0 for ones in by_target.values())
    return [
        kernel,
        f"{len(built)}/{len(targets)}",
        *(_text(_most(by_target[t], "registers")) for t in targets),
        *(_text(_most(by_target[t], "shared_bytes"), 1024) for t in targets),
        str(spills),
        f"{error['worst']:.1e} of {error['bound']:.0e}" if error else "-",
    ]


def _most(lines: Iterable[Line], field: str) -> int | None:
    return max((one[field] for line in lines for one in line["compiled"]), default=None)


def _text(value: int | None, unit: int = 1) -> str:
    return "-" if value is None else str(-(-value // unit))
