"""What the compile gate lets pass, each with its reason. What no longer occurs is an error too: strike it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["refused", "failed", "spill", "smem", "instruction", "fusion"]


@dataclass(frozen=True)
class Finding:
    """Something about one sample on one target. `triton`: major and minor version."""

    kernel: str
    sample: str
    target: str
    kind: Kind
    triton: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.sample}) on {self.target}, Triton {self.triton}: {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Known:
    """`sample` is a pattern. `triton`: the versions with which it occurs."""

    kernel: str
    sample: str
    target: str
    kind: Kind
    reason: str
    triton: tuple[str, ...] = ("3.6", "3.7", "3.8", "3.9")

    def covers(self, finding: Finding) -> bool:
        return (
            (self.kernel, self.target, self.kind) == (finding.kernel, finding.target, finding.kind)
            and fnmatchcase(finding.sample, self.sample)
            and finding.triton in self.triton
        )

    def __str__(self) -> str:
        return f"{self.kernel} ({self.sample}) on {self.target}: {self.kind}"


_NO_E4M3 = "before sm_89 no instruction converts e4m3, and the compiler writes none; such a GPU keeps KV in bf16"

KNOWN: tuple[Known, ...] = tuple(
    Known(kernel, "e4m3", "sm_80", "refused", _NO_E4M3) for kernel in ("paged_decode", "paged_prefill", "rope_kv_write")
)


def unexplained(findings: Iterable[Finding], known: Iterable[Known]) -> list[Finding]:
    listed = tuple(known)
    return [finding for finding in findings if not any(one.covers(finding) for one in listed)]


def outdated(
    findings: Iterable[Finding], known: Iterable[Known], tried: set[tuple[str, str]], triton: str
) -> list[Known]:
    """Those that should have occurred, of the (kernel, target) that were tried with this version, and did not."""
    seen = tuple(findings)
    expected = [one for one in known if (one.kernel, one.target) in tried and triton in one.triton]
    return [one for one in expected if not any(one.covers(finding) for finding in seen)]
