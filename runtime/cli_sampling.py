"""How a new session answers, as people say it on a command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
_REALS: Final = {
    "temperature": "0 is greedy, 2 the most.",
    "top-p": "Keep the likeliest tokens that together reach this.",
    "min-p": "Leave out what is less likely than this share of the likeliest.",
    "repetition-penalty": "Of tokens in the transcript; 1 is none.",
    "presence-penalty": "Of tokens that were said, once.",
    "frequency-penalty": "Of tokens that were said, each time.",
}
_NAMES: Final = (*(name.replace("-", "_") for name in _REALS), "top_k", "stop")


def sampling_options(command: Command) -> Command:
    """The options; `made_of` takes them out of what the command was given again."""
    options = [click.option(f"--{name}", type=float, help=text) for name, text in _REALS.items()]
    options += [
        click.option("--top-k", type=click.IntRange(min=0), help="Keep the likeliest tokens, so many."),
        click.option("--stop", multiple=True, help="A text that ends an answer, and is not shown."),
        click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same tokens."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Of one answer or call."),
        click.option(
            "--schema",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A JSON schema that answers are to have.",
        ),
        click.option("--pattern", help="A regular expression that answers are to be."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def made_of(given: dict[str, Any]) -> dict[str, Any]:
    """What of a session these options say; takes them out of `given`. Raises click.UsageError."""
    said = {name: given.pop(name, None) for name in (*_NAMES, "seed", "max_tokens", "schema", "pattern")}
    sampling = {name: said[name] for name in _NAMES if said[name] not in (None, ())}
    if "stop" in sampling:
        sampling["stop"] = list(sampling["stop"])
    made = {"sampling": sampling or None, "seed": said["seed"], "response_format": _form(said)}
    made["limits"] = {"max_think_tokens": said["max_tokens"]} if said["max_tokens"] else None
    return {name: value for name, value in made.items() if value is not None}


def _form(said: dict[str, Any]) -> dict[str, Any] | None:
    if said["schema"] is not None and said["pattern"] is not None:
        raise click.UsageError("--schema and --pattern are two forms of one answer; give one of them")
    if said["pattern"] is not None:
        return {"type": "regex", "pattern": said["pattern"]}
    if said["schema"] is None:
        return None
    try:
        schema = json.loads(said["schema"].read_text())
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--schema {said['schema']}: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError(f"--schema {said['schema']}: it is no object")
    return {"type": "json_schema", "json_schema": schema}
