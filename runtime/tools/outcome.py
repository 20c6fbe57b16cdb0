"""How a call ended, wherever it ran: what the ledger records, and what the model reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sandbox import Ran, Result

_TEXT = ("text/", "application/json", "application/xml", "application/javascript", "application/x-www-form-urlencoded")
_HOW = {
    "refused": "not executed",
    "timeout": "stopped at its time limit",
    "oom": "stopped at its memory limit",
    "unreachable": "it could not be reached",
    "no_answer": "no answer came; it may have taken effect all the same",
    "interrupted": "interrupted by the user",
    "error": "the tool reports an error",
    "server_ended": "the server ended before it answered",
}


@dataclass(frozen=True)
class Outcome:
    """`reason` and `code`: exit (its exit code), signal (its number), http (the status), error, or why there is none.

    `output` is capped where it came from; `facts` is more of what can be said about it.
    """

    reason: str
    code: int | None
    output: bytes
    truncated: bool = False
    facts: Mapping[str, Any] | None = None

    def as_result(self) -> dict[str, Any]:
        about = {"reason": self.reason, "code": self.code, "truncated": self.truncated}
        return {**about, "output_bytes": len(self.output), **(self.facts or {})}

    def noting(self, left_out: Sequence[str]) -> Outcome:
        """The same, and what of the workspace is not kept beyond this sandbox."""
        if not left_out:
            return self
        more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        note = f"\n[not kept with the workspace: {'; '.join(left_out[:3])}{more}]".encode(errors="replace")
        return replace(self, output=self.output + note)

    @classmethod
    def refused(cls, why: str) -> Outcome:
        return cls("refused", None, why.encode())

    @classmethod
    def of_sandbox(cls, done: Result, *, kept: bool) -> Outcome:
        """`kept`: what it left in the background lives on."""
        facts: dict[str, Any] = {"stdout_bytes": done.stdout_bytes, "stderr_bytes": done.stderr_bytes}
        if done.background:
            left = f"{done.background} process{'es' if done.background > 1 else ''} in the background"
            facts["note"] = f"{left} {'still running' if kept else 'ended with the call'}"
        return cls(done.reason, done.code, done.output, done.truncated, facts)

    @classmethod
    def of_shell(cls, ran: Ran) -> Outcome:
        notes = ["in a new shell"] if ran.fresh else []
        notes += ["the shell ended with it; the next call begins in a new one"] if ran.over else []
        outcome = cls.of_sandbox(ran.result, kept=True)
        return replace(outcome, facts={**(outcome.facts or {}), **({"note": "; ".join(notes)} if notes else {})})


def capped(data: bytes, limit_bytes: int, total_bytes: int | None) -> tuple[bytes, bool]:
    """At most the limit and a marker, and whether that was needed. `total_bytes`: how long it is, where that is known
    of what was not read to its end."""
    if len(data) <= limit_bytes:
        return data, False
    left_out = "the rest" if total_bytes is None else f"{max(total_bytes, len(data)) - limit_bytes} bytes"
    return data[:limit_bytes] + f"\n[... {left_out} left out ...]\n".encode(), True


def as_text(result: Mapping[str, Any], output: bytes) -> str:
    """What the model reads: the output, and how the call ended where that is not plain success."""
    text = _readable(output, str(result.get("content_type", "")))
    reason, code = result["reason"], result["code"]
    text += f"\n[{result['note']}]" if result.get("note") else ""
    if (reason == "exit" and code == 0) or reason == "ok" or (reason == "http" and code < 400):
        return text.strip() or "(no output)"
    codes = {"exit": f"exit code {code}", "signal": f"ended by signal {code}", "http": f"HTTP status {code}"}
    return f"{text}\n[{codes.get(reason) or _HOW.get(reason, reason)}]".strip()


def _readable(output: bytes, content_type: str) -> str:
    kind = content_type.partition(";")[0].strip().lower()
    if kind and not kind.startswith(_TEXT) and not kind.endswith(("+json", "+xml")):
        return f"[{kind}, {len(output)} bytes]"
    return output.decode("utf-8", "replace").strip()
