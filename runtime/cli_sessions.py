"""`tenuto sessions`, `logs`, `steps`, `checkpoints`, `fork`, `rewind`: sessions, what happened in them, going back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import click
import tenuto

from runtime.cli_listing import AS_JSON, SESSION, moment, show, told
from runtime.cli_telling import tell
from workflows.states import State

_FILTERS = (
    click.option(
        "--state", "states", multiple=True, type=click.Choice([str(one) for one in State]), help="Any of these."
    ),
    click.option("--agent", help="Of an agent: `name`, or `name@3`."),
    click.option("--limit", type=click.IntRange(1), help="So many at most; all by default."),
    AS_JSON,
)


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@_filters
@click.pass_context
def sessions(ctx: click.Context, states: tuple[str, ...], agent: str | None, limit: int | None, as_json: bool) -> None:
    """List sessions, newest first; show one, and say what is to become of it."""
    if ctx.invoked_subcommand is None:
        _list(states, agent, limit, as_json)
    elif states or agent or limit or as_json:
        raise click.UsageError(f"give options behind the verb: tenuto sessions {ctx.invoked_subcommand} ...")


@sessions.command("list")
@_filters
def list_all(states: tuple[str, ...], agent: str | None, limit: int | None, as_json: bool) -> None:
    """List sessions, newest first."""
    _list(states, agent, limit, as_json)


def _list(states: tuple[str, ...], agent: str | None, limit: int | None, as_json: bool) -> None:
    with tenuto.Client() as client:
        found = client.sessions.list(limit=min(limit or 200, 200), agent=agent, state=list(states) or None)
        show(
            (one.model_dump(mode="json") for one in itertools.islice(found, limit)),
            as_json,
            ("session", "state", "agent", "model", "changed"),
            lambda one: (
                one["id"],
                one["state"] + (f" ({one['waiting_for']})" if one["waiting_for"] else ""),
                f"{one['agent']['name']}@{one['agent']['version']}" if one.get("agent") else "",
                one["model"],
                moment(one.get("updated_at")),
            ),
        )


@sessions.command("show")
@SESSION
@AS_JSON
def show_one(session: str, as_json: bool) -> None:
    """How a session stands, and what it was made of."""
    with tenuto.Client() as client:
        info = client.sessions.get(session).info().model_dump(mode="json")
    if as_json:
        click.echo(json.dumps(info))
        return
    rows = [{"name": name, "value": value} for name, value in info.items() if value not in (None, "", [], {})]
    show(rows, False, ("", ""), lambda one: (one["name"].replace("_", " "), _plain(one["value"])))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list):
        return ", ".join(one["name"] if isinstance(one, Mapping) and "name" in one else _plain(one) for one in value)
    return str(value)


def _verb(name: str, words: str) -> None:
    """One of the verbs that a session takes."""

    @sessions.command(name, help=words)
    @SESSION
    @click.option("--no-wait", is_flag=True, help="Return once it is accepted, not once it is done.")
    @AS_JSON
    def command(session: str, no_wait: bool, as_json: bool) -> None:
        with tenuto.Client() as client:
            info: tenuto.SessionInfo = getattr(client.sessions.get(session), name)(wait=not no_wait)
        told(info.model_dump(mode="json"), as_json, f"{session} is {info.state}")


for _name, _words in {
    "cancel": "Stop a session and free what it holds.",
    "complete": "End a session that rests and free what it holds.",
    "pause": "Stop spending: a think stops at its last token, a tool runs to its end.",
    "resume": "Go on where the session was paused.",
    "retry": "Go on at the step that failed.",
    "interrupt": "End the turn: what was said stays, and the session rests.",
}.items():
    _verb(_name, _words)


@click.command()
@SESSION
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the session ends.")
@click.option("--after", type=click.IntRange(0), default=0, show_default=True, help="Behind this position.")
@click.option("--json", "as_json", is_flag=True, help="Events as they are, one JSON object per line.")
def logs(session: str, follow: bool, after: int, as_json: bool) -> None:
    """What happened in a session. With -f it goes on by itself after a lost connection, and misses nothing."""
    with tenuto.Client() as client:
        found = client.sessions.get(session)
        for event in found.stream(after) if follow else found.events(after):
            tell(event, as_json)


@click.command()
@SESSION
@AS_JSON
def steps(session: str, as_json: bool) -> None:
    """The steps of a session: what each was, and how it went."""
    with tenuto.Client() as client:
        show(
            client.sessions.get(session).steps(),
            as_json,
            ("step", "kind", "state", "attempts", "tokens", "live", "ended"),
            lambda one: (
                str(one["id"]),
                one["kind"],
                one["state"],
                str(one["attempts"]),
                str(one["token_count"]),
                "yes" if one["live"] else "no",
                moment(one["ended_at"]) if one["ended_at"] else "",
            ),
        )


@click.command()
@SESSION
@AS_JSON
def checkpoints(session: str, as_json: bool) -> None:
    """The checkpoints of a session: what it can be forked at and rewound to, by step."""
    with tenuto.Client() as client:
        show(
            client.sessions.get(session).checkpoints(),
            as_json,
            ("step", "kind", "tokens", "live", "workspace", "made"),
            lambda one: (
                str(one["id"]),
                one["kind"],
                str(one["tokens"]),
                "yes" if one["live"] else "no",
                (one["workspace_root"] or "")[:12],
                moment(one["created_at"]),
            ),
        )


_SEED = click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="What is sampled from there on differs.")
_RESUME = click.option("--resume", is_flag=True, help="Go on with what was being done there, if anything was.")


@click.command()
@SESSION
@click.option("--step", type=click.IntRange(1, 2**31 - 1), help="At the checkpoint of this step; the last by default.")
@_SEED
@_RESUME
@AS_JSON
def fork(session: str, step: int | None, seed: int | None, resume: bool, as_json: bool) -> None:
    """A new session that begins as this one was; nothing is copied. Prints its id."""
    with tenuto.Client() as client:
        made = client.sessions.get(session).fork(step, seed=seed, resume=resume)
        told(made.info().model_dump(mode="json"), as_json, made.id)


@click.command()
@SESSION
@click.argument("step", type=click.IntRange(1, 2**31 - 1))
@_SEED
@_RESUME
@AS_JSON
def rewind(session: str, step: int, seed: int | None, resume: bool, as_json: bool) -> None:
    """Go back to the checkpoint of a step; what came after stays in the record."""
    with tenuto.Client() as client:
        info = client.sessions.get(session).rewind(step, seed=seed, resume=resume)
    told(info.model_dump(mode="json"), as_json, f"{session} is {info.state} at step {step}")
