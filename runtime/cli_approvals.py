"""`tenuto approvals` and `tenuto approve`: what sessions wait for, and the answers."""

from __future__ import annotations

import math
from typing import Any

import click
import tenuto

from runtime.cli_listing import AS_JSON, SESSION_ID, every, moment, show, told
from runtime.cli_telling import about

_NEEDS = {
    "client_tool": "--output, the result of the call",
    "outcome": "--output where the call took place, --did-not-run where it did not, or --decline",
    "budget": "--limit MEASURE=NUMBER, or --stop",
}


@click.command()
@click.option("--session", type=SESSION_ID, help="Of one session.")
@click.option("--state", type=click.Choice(["open", "answered", "expired", "void"]), default="open", show_default=True)
@AS_JSON
def approvals(session: str | None, state: str, as_json: bool) -> None:
    """List what sessions wait for, oldest first."""
    with tenuto.Client() as client:
        show(
            every(client, "/v1/approvals", session=session, state=state),
            as_json,
            ("question", "kind", "session", "step", "until", "about"),
            lambda one: (
                one["id"],
                one["kind"].replace("_", " "),
                one["session_id"],
                str(one["step"]),
                moment(one["expires_at"]) if one["expires_at"] else "",
                about(one["about"]),
            ),
        )


@click.command()
@click.argument("question")
@click.option("--decline", "declined", metavar="REASON", help="Do not run it; the model is told why.")
@click.option("--output", metavar="TEXT", help="The result of your own tool, or of a call that did take place.")
@click.option("--error", "is_error", is_flag=True, help="The output tells what went wrong.")
@click.option("--did-not-run", is_flag=True, help="A call of unknown outcome did not take place; it runs now.")
@click.option("--limit", "limits", multiple=True, metavar="MEASURE=NUMBER", help="A new limit of the budget, or none.")
@click.option("--stop", is_flag=True, help="End the turn that used its budget up.")
@AS_JSON
def approve(question: str, as_json: bool, **said: Any) -> None:
    """Answer what a session waits for: approve a call, or as an option says."""
    with tenuto.Client() as client:
        kind = client.question(question).kind
        answer = _answer(kind, **said)
        found = client.answer(question, **answer)
    told(found.model_dump(mode="json"), as_json, f"{question}: {answer['decision'].replace('_', ' ')}")


def _answer(
    kind: str,
    declined: str | None,
    output: str | None,
    is_error: bool,
    did_not_run: bool,
    limits: tuple[str, ...],
    stop: bool,
) -> dict[str, Any]:
    """Raises click.UsageError where the options are none for this kind of question, or are several."""
    given: list[tuple[str, dict[str, Any]]] = []
    if declined is not None:
        given.append(("approval outcome", {"decision": "decline", "reason": declined}))
    if output is not None and kind == "outcome":
        given.append(("outcome", {"decision": "ran", "output": output}))
    elif output is not None:
        given.append(("client_tool", {"decision": "result", "output": output, "is_error": is_error}))
    if did_not_run:
        given.append(("outcome", {"decision": "did_not_run"}))
    if limits:
        given.append(("budget", {"decision": "raise", "budget": dict(map(_limit, limits))}))
    if stop:
        given.append(("budget", {"decision": "stop"}))
    if not given and kind == "approval":
        return {"decision": "approve"}
    if len(given) != 1 or kind not in given[0][0].split() or (is_error and kind != "client_tool"):
        needs = _NEEDS.get(kind, "--decline REASON, or nothing, which approves it")
        raise click.UsageError(f"this question is about {kind.replace('_', ' ')}: give {needs}")
    return given[0][1]


def _limit(text: str) -> tuple[str, float | int | None]:
    measure, _, number = text.partition("=")
    try:
        value = None if number == "none" else int(number) if number.isdecimal() else float(number)
        if value is not None and not math.isfinite(value):
            raise ValueError(number)
    except (ValueError, OverflowError):
        raise click.UsageError(f"--limit is {text!r}; use such as tokens=50000, or tokens=none") from None
    return measure, value
