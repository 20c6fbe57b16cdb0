"""`tenuto run`: one task, as people give it: in a new session or one that there is, with approvals and Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import tenuto

from runtime.cli_listing import SESSION_ID
from runtime.cli_sampling import made_of, sampling_options
from runtime.cli_telling import about

INCOMPLETE: Final = 3
INTERRUPTED: Final = 130  # as a shell says it of Ctrl-C
_CHOICES: Final = ("auto", "none", "required")
_BUILT_IN: Final = ("bash", "python", "read_file", "shell", "write_file")


@click.command()
@click.argument("task")
@click.option("--session", "session_id", type=SESSION_ID, help="Go on in this session instead of a new one.")
@click.option("--agent", help="What the session is made of: `name`, or `name@3`.")
@click.option("--model", help="The model; whichever is served by default.")
@click.option("--system", help="What the model is told first.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(_BUILT_IN), help="A built-in tool.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text that the workspace begins with, under its name.",
)
@click.option("--tool-choice", default="auto", show_default=True, help="auto, none, required or a tool's name.")
@click.option("--rounds", type=click.IntRange(0, 1000), default=8, show_default=True, help="Tool rounds at most.")
@click.option(
    "--approve",
    type=click.Choice(["ask", "all", "none"]),
    help="ask: every call of a new session waits for your word; all: whatever waits for one has it; none: the run stops"
    " there. By default you are asked, where somebody is there, of what the agent says.",
)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    task: str,
    session_id: str | None,
    tools: tuple[str, ...],
    files: tuple[Path, ...],
    tool_choice: str,
    rounds: int,
    approve: str | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Give a session one task and print its answer as it comes.

    Ends with 0 where the answer is final, 1 where the session failed, 2 where the command is wrong, 3 where the answer
    is incomplete or the session waits for a word, 130 after Ctrl-C, which ends the turn and keeps the session.
    """
    said = {name: value for name, value in others.items() if value not in (None, ())}
    answers = made_of(others)
    given = {name: value for name, value in others.items() if value is not None}
    _check(task, session_id, said, tools, files, tool_choice, approve)
    given |= answers
    texts = _texts(files)
    with tenuto.Client() as client:
        if session_id is None:
            approvals: dict[str, Any] | None = {"*": {}} if approve == "ask" and (tools or "agent" in given) else None
            chosen = list(tools) if tools or "agent" not in given else None
            session = client.sessions.create(tools=chosen, files=texts or None, approvals=approvals, **given)
        else:
            session = client.sessions.get(session_id)
        click.echo(f"session {session.id}", err=True)
        turn = session.turn(task, tool_choice=tool_choice, max_tool_rounds=rounds, approve=_approver(approve))
        ctx.exit(_follow(session, turn, as_json))


def _check(
    task: str,
    session_id: str | None,
    given: dict[str, Any],
    tools: Sequence[str],
    files: Sequence[Path],
    tool_choice: str,
    approve: str | None,
) -> None:
    """What can be known to be wrong before a session is made. Raises click.UsageError."""
    if not task.strip():
        raise click.UsageError("the task is empty")
    if session_id is not None and (said := [*given, *(["tool"] if tools else []), *(["file"] if files else [])]):
        raise click.UsageError(
            f"--{said[0].replace('_', '-')} says what a new session is made of; --session names one that there is"
        )
    if session_id is None and "agent" not in given and tool_choice not in (*_CHOICES[:2], *tools):
        if tool_choice != "required":
            raise click.UsageError(f"--tool-choice is {tool_choice!r}; use {', '.join(_CHOICES)} or a --tool")
        if not tools:
            raise click.UsageError("--tool-choice required needs a --tool")
    if approve == "ask" and not sys.stdin.isatty():
        raise click.UsageError("--approve ask needs a terminal; use all or none")


def _texts(files: Sequence[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in files:
        if path.name in found:
            raise click.UsageError(f"--file: two have the name {path.name}")
        try:
            found[path.name] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--file {path}: {error}; `tenuto files put` takes any bytes") from None
    return found


def _approver(approve: str | None) -> Callable[[tenuto.Question], bool] | None:
    if approve == "all":
        return lambda _: True
    return _ask if approve == "ask" or (approve is None and sys.stdin.isatty()) else None


def _ask(question: tenuto.Question) -> bool:
    click.echo(err=True)
    return click.confirm(f"{about(question.about)}: run it?", err=True)


def _follow(session: tenuto.Session, turn: tenuto.RunningTurn, as_json: bool) -> int:
    """The exit status."""
    try:
        with turn:
            for event in turn:
                _tell(event, as_json)
        outcome = turn.result().outcome
    except tenuto.NeedsAnswer as error:
        click.echo(f"\ntenuto: {error}", err=True)
        click.echo(f"answer it: tenuto approve {error.question.id} --help", err=True)
        return INCOMPLETE
    except (KeyboardInterrupt, click.Abort):
        session.interrupt(wait=False)
        click.echo("\ninterrupted; the session is kept. Go on with:", err=True)
        click.echo(f"  tenuto run --session {session.id} TASK", err=True)
        return INTERRUPTED
    if not as_json:
        click.echo()
    if outcome != "final":
        click.echo(f"the answer is {outcome}", err=True)
    return 0 if outcome == "final" else INCOMPLETE


def _tell(event: tenuto.Event, as_json: bool) -> None:
    data: dict[str, Any] = event.data
    if as_json:
        click.echo(event.model_dump_json())
    elif event.type == "model.delta":
        click.echo(data["text"], nl=False)
        sys.stdout.flush()
    elif event.type == "step.retrying" and data.get("dropped"):
        click.echo("\n[the model was cut off, and says this anew]\n", err=True)
    elif event.type == "message.completed" and data["outcome"] == "corrected":
        click.echo("\n[that was meant as a call and is none; the model was told so]\n", err=True)
    elif event.type == "tool.requested":
        click.echo(f"\n[{data['name']}] {json.dumps(data['arguments'], ensure_ascii=False)}", err=True)
    elif event.type == "tool.settled":
        click.echo(f"[{data['name']}] {data['preview'].rstrip()}\n", err=True)
