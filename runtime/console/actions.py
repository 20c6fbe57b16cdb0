"""What an operator can do, as a table: which request it is, what it is called, and what will be lost.

A form of the console names one of these. What loses something is asked for twice: its first page says what goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runtime.console.inside import segment

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Action:
    """`path`: below /v1/admin, filled from the form's fields. `body`: those of the fields that are sent, each as its
    reader reads it (ValueError: the operator is told). `loses`: what is lost, where anything is; then it is confirmed
    first. `asks`: fields that the confirmation asks for, with their labels."""

    title: str
    method: str
    path: str
    done: str
    loses: str | None = None
    body: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    asks: Mapping[str, str] = field(default_factory=dict)

    def request(self, fields: Fields) -> tuple[str, dict[str, Any]]:
        """Raises ValueError, KeyError."""
        sent = {name: read(fields[name]) for name, read in self.body.items() if fields.get(name, "") != ""}
        return self.path.format(**{name: segment(text) for name, text in fields.items()}), {**self.fixed, **sent}


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _yes(text: str) -> bool:
    return text in ("on", "true", "1", "yes")


def _session(verb: str, title: str, done: str, **rest: Any) -> Action:
    return Action(title, "POST", f"/tenants/{{tenant}}/sessions/{{session}}/{verb}", done, **rest)


def _answer(decision: str, title: str, done: str, **rest: Any) -> Action:
    path = "/tenants/{tenant}/approvals/{question}"
    return Action(title, "POST", path, done, fixed={"decision": decision}, **rest)


_GONE = "Its sandbox, its files and its KV pages go. The record of what happened stays."

ACTIONS: Final[Mapping[str, Action]] = {
    "session.pause": _session("pause", "Pause", "It pauses: a think at its last durable token, a tool at its end."),
    "session.resume": _session("resume", "Resume", "It goes on where it was paused."),
    "session.retry": _session("retry", "Retry", "The step that failed begins again."),
    "session.interrupt": _session(
        "interrupt", "End the turn", "The turn ends.", loses="Calls that run are stopped and told as interrupted."
    ),
    "session.message": _session("events", "Send", "The message is accepted.", body={"content": str}),
    "session.fork": _session(
        "fork", "Fork", "A new session begins as this one was there.", body={"step": whole, "resume": _yes}
    ),
    "session.rewind": _session(
        "rewind",
        "Rewind",
        "It goes back to that checkpoint.",
        loses="The transcript, files and pages after this step leave the branch. They stay in the record.",
        body={"step": whole},
    ),
    "session.cancel": _session("cancel", "Cancel the session", "It is being cancelled.", loses=_GONE),
    "session.pin": _session("kv/pin", "Pin", "Its pages stay on the device."),
    "session.offload": _session("kv/offload", "Offload", "Its pages go to a lower tier.", body={"tier": str}),
    "session.prefetch": _session("kv/prefetch", "Prefetch", "Its pages are read back."),
    "session.release": _session(
        "kv/release",
        "Release KV",
        "Its pages are released.",
        loses="Its KV pages in every tier. The next think computes them again.",
    ),
    "session.exec": _session(
        "sandbox/exec?wait_s=20", "Run", "It ran.", body={"command": str}, fixed={"timeout_s": 20}
    ),
    "sessions.cancel": Action(
        "Cancel all of these",
        "POST",
        "/sessions/cancel",
        "They are being cancelled.",
        loses="Sandboxes, files and KV pages of all of them go. Their records stay.",
    ),
    "approval.approve": _answer("approve", "Approve", "It was approved."),
    "approval.decline": _answer("decline", "Decline", "It was declined; the model is told why.", body={"reason": str}),
    "approval.ran": _answer("ran", "It did run", "Settled as having run.", body={"output": str}),
    "approval.did_not_run": _answer(
        "did_not_run",
        "It did not run",
        "Settled as not having run; it runs now.",
        loses="Nothing, if it truly did not run. If it did, it runs a second time.",
        body={"reason": str},
    ),
    "approval.result": _answer("result", "Send the result", "The result was sent.", body={"output": str}),
    "approval.raise": Action(
        "Raise the budget",
        "POST",
        "/tenants/{tenant}/approvals/{question}",
        "The budget was raised.",
        body={"budget": lambda text: {"tokens": whole(text)}},
        fixed={"decision": "raise"},
    ),
    "approval.stop": _answer("stop", "Stop the turn", "The turn ends.", body={"reason": str}),
    "node.drain": Action(
        "Drain",
        "POST",
        "/nodes/{node}/drain",
        "The node takes no more sessions, and hands over those that it has.",
        loses="Nothing. Steps that run get a minute to end, then they go on elsewhere; without another node they wait.",
    ),
    "node.undrain": Action("Undrain", "POST", "/nodes/{node}/undrain", "The node starts anew and takes sessions."),
    "kv.audit": Action("Audit", "POST", "/kv/audit", "Every page was read."),
    "kv.repair": Action(
        "Audit and repair",
        "POST",
        "/kv/audit",
        "Every page was read, and what nobody names was deleted.",
        loses="Pages that no session names, and half-written files. Nothing that a session could come back for.",
        fixed={"repair": True},
    ),
    "reconcile": Action("Reconcile", "POST", "/reconcile", "Every open session has a workflow."),
    "key.create": Action(
        "Make a key",
        "POST",
        "/keys",
        "The key is shown once: keep it now.",
        body={"tenant": str, "scope": str, "name": str, "requests_per_minute": whole},
    ),
    "key.revoke": Action(
        "Revoke", "POST", "/keys/{key}/revoke", "The key works no more.", loses="Whoever uses this key is refused."
    ),
    "key.rotate": Action(
        "Rotate",
        "POST",
        "/keys/{key}/rotate",
        "The new key is shown once: keep it now.",
        loses="The old key, once its grace is over.",
        body={"grace_s": whole},
        asks={"grace_s": "Seconds for which the old key still works"},
    ),
    "tenant.create": Action("Make a tenant", "POST", "/tenants", "The tenant is there.", body={"id": str}),
    "tenant.quotas": Action(
        "Set quotas",
        "PATCH",
        "/tenants/{tenant}",
        "They hold from now on.",
        body={"quotas": lambda text: _quotas(text)},
    ),
    "tenant.disable": Action(
        "Disable",
        "POST",
        "/tenants/{tenant}/disable",
        "All its keys are refused.",
        loses="Every request of this tenant is refused until it is enabled. Its sessions stay open.",
    ),
    "tenant.enable": Action("Enable", "POST", "/tenants/{tenant}/enable", "Its keys work again."),
    "webhook.test": Action("Send a test", "POST", "/tenants/{tenant}/webhooks/{webhook}/test", "A test is on its way."),
    "webhook.replay": Action(
        "Replay",
        "POST",
        "/tenants/{tenant}/webhooks/{webhook}/deliveries/{delivery}/replay",
        "It is sent again, with the same id.",
    ),
    "webhook.delete": Action(
        "Delete",
        "DELETE",
        "/tenants/{tenant}/webhooks/{webhook}",
        "The webhook is gone.",
        loses="The webhook, and all that was still to be sent there.",
    ),
}


def _quotas(text: str) -> dict[str, int | None]:
    """`sessions=10 sandboxes=none`."""
    found: dict[str, int | None] = {}
    for word in _words(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"quotas: {word!r} is not NAME=NUMBER; use sessions=10, or sessions=none for no quota")
        found[name] = None if value in ("none", "") else whole(value)
    return found
