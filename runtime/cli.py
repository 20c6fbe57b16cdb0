"""The `tenuto` command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click
import tenuto
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine import DownloadError, EngineError, models, pull
from kvtier import TierError
from runtime.cli_admin import audit, keys, tenants, usage
from runtime.cli_agents import agents
from runtime.cli_approvals import approvals, approve
from runtime.cli_completion import completion
from runtime.cli_doctor import doctor_group
from runtime.cli_files import execute, export, files, import_
from runtime.cli_fleet import node, nodes, reconcile, release
from runtime.cli_kv import kv
from runtime.cli_listing import show
from runtime.cli_mcp import mcp
from runtime.cli_plan import plan
from runtime.cli_run import run
from runtime.cli_schedules import schedules
from runtime.cli_secrets import secrets
from runtime.cli_sessions import checkpoints, fork, logs, rewind, sessions, steps
from runtime.cli_webhooks import webhooks
from runtime.errors import StartupError, TenutoError
from runtime.settings import Settings, ensure_spelt
from runtime.settings_words import WORDS
from sandbox import SandboxError


class _Group(click.Group):
    """Errors that we raise on purpose are a sentence and exit status 1, not a traceback. Whoever reads our output may
    stop (`| head -1`), which is no error at all."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
            _leave(0)
        except (TenutoError, EngineError, SandboxError, TierError, tenuto.TenutoError) as error:
            click.echo(f"tenuto: {error}", err=True)
            _leave(1)


def _leave(status: int) -> NoReturn:
    """End the process. Temporal's client has threads of its own that can abort an interpreter that is finalising
    ("PyGILState_Release: thread state must be current"), which would turn a sentence into a core dump."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "temporalio" in sys.modules:
        os._exit(status)
    sys.exit(status)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tenuto-server", prog_name="tenuto")
def main() -> None:
    """An agent session runtime with KV persistence."""
    ensure_spelt()


_SETTINGS = "\b\nSettings, from the environment:\n" + "\n".join(f"  {key:<28} {words}" for key, words in WORDS.items())


@main.command(epilog=_SETTINGS)
@click.option(
    "--model",
    help="A name from `tenuto model list`, a GGUF file, a Hugging Face directory, or a server: openai:URL[#MODEL].",
)
@click.option("--home", help="The data directory (TENUTO_HOME).")
@click.option("--nodes", help="Nodes, each with an engine of its own (TENUTO_NODES).")
@click.option("--workers", help="Processes that run workflows (TENUTO_WORKERS).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event, for programs.")
def up(model: str | None, home: str | None, nodes: str | None, workers: str | None, as_json: bool) -> None:
    """Start everything, restart what dies, stop it all on Ctrl-C."""
    from runtime import preflight
    from runtime import up as stack

    given = {"TENUTO_MODEL": model, "TENUTO_HOME": home, "TENUTO_NODES": nodes, "TENUTO_WORKERS": workers}
    settings = Settings.load(overrides={key: value for key, value in given.items() if value})
    # Until the stack handles signals itself, one to end is like Ctrl-C: what was begun is undone on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    preflight.check_machine(settings)
    if not as_json:
        ensure_model(settings)
    preflight.check_model(settings)
    asyncio.run(stack.up(settings, _told_as_json if as_json else _told))


@main.command()
@click.option("--seed", type=int, default=7, show_default=True, help="Decides the model's draws and the kill points.")
@click.option("--temperature", type=float, default=0.8, show_default=True)
@click.option("--model", help="A name from `tenuto model list`, a GGUF file, or a Hugging Face directory.")
@click.option("--context", type=int, default=1500, show_default=True, help="Tokens of context for the timings.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on the last line.")
def demo(seed: int, temperature: float, model: str | None, context: int, as_json: bool) -> None:
    """A real session: three tool rounds, KV out to NVMe and back, kill -9, resume, and a table of what it cost."""
    from runtime import preflight
    from runtime.demo import DemoOptions, run_demo

    settings = Settings.load(overrides={"TENUTO_MODEL": model} if model else {})
    if settings.external is not None:
        raise StartupError("the demo measures pages, and a model server keeps its own; name a model for an engine here")
    preflight.check_sandbox(settings)
    ensure_model(settings)
    preflight.check_model(settings)
    options = DemoOptions(seed, temperature, settings.model, context)
    click.echo("the demo takes about three minutes on two cores", err=True)
    try:
        outcome = asyncio.run(run_demo(options, Console(stderr=as_json)))
    except asyncio.CancelledError:
        sys.exit("tenuto: the demo was stopped; nothing is left of it")
    if as_json:
        click.echo(json.dumps(outcome.as_json()))
    sys.exit(0 if outcome.good else 1)


@main.command()
@click.option("--node", help="Of this node; all by default.")
@click.option("--address", help="Ask this socket path or host:port itself, past the API, as where that is away.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per engine.")
def engine(node: str | None, address: str | None, as_json: bool) -> None:
    """What engines measure of themselves: times, batch, pages by state, tokens by source, preemptions."""
    from runtime import engine_view

    found: list[dict[str, Any]]
    if address is not None:
        card, stats = asyncio.run(engine_view.ask(address))
        found = [{"id": address, "card": card.as_message(), "stats": stats, "error": None}]
    else:
        with tenuto.Client() as client:
            found = client.get("/v1/admin/engines", {"node": node} if node else None)["data"]
    for one in found:
        if as_json:
            figures = {"error": one["error"]} if one["stats"] is None else {**one["card"], **one["stats"]}
            click.echo(json.dumps({"node": one["id"], **figures}))
        else:
            click.echo(one["id"])
            Console().print(engine_view.view_of(one))


for command in (
    agents,
    approvals,
    approve,
    audit,
    checkpoints,
    completion,
    doctor_group,
    execute,
    export,
    files,
    fork,
    import_,
    keys,
    kv,
    logs,
    mcp,
    node,
    nodes,
    plan,
    reconcile,
    release,
    rewind,
    run,
    schedules,
    secrets,
    sessions,
    steps,
    tenants,
    usage,
    webhooks,
):
    main.add_command(command)


@main.group()
def model() -> None:
    """Models: which there are, and how to get them."""


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model.")
def model_list(as_json: bool) -> None:
    """Models that can be had from the package index alone."""
    folder = Settings.load().models_dir
    rows = [
        {"name": one.name, "size_bytes": one.size_bytes, "is_here": (folder / f"{one.name}.gguf").exists()}
        for one in models()
    ]
    show(
        rows,
        as_json,
        ("model", "size", ""),
        lambda one: (one["name"], f"{one['size_bytes'] / 1e6:.0f} MB", "here" if one["is_here"] else "not pulled"),
    )


@model.command("pull")
@click.argument("name")
def model_pull(name: str) -> None:
    """Fetch a model, verify its sha256, and keep it for every installation of this user."""
    settings = Settings.load()
    with _progress() as report:
        path = pull(name, settings.models_dir, report)
    click.echo(f"{name} is at {path}")


def ensure_model(settings: Settings) -> None:
    """Pull the catalogue model that is asked for, unless it is here."""
    catalogue = {entry.name for entry in models()}
    if settings.model in catalogue and not (settings.models_dir / f"{settings.model}.gguf").exists():
        click.echo(f"fetching {settings.model}, once")
        try:
            with _progress() as report:
                pull(settings.model, settings.models_dir, report)
        except DownloadError as error:
            raise StartupError(f"{error}; or give TENUTO_MODEL the path of a model that is here") from error


@contextmanager
def _progress() -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def report(done_bytes: int, total_bytes: int, what: str) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes, description=what)

        yield report


def _told(kind: str, **data: Any) -> None:
    _say(data.get("message", kind))


def _told_as_json(kind: str, **data: Any) -> None:
    _say(json.dumps({"kind": kind, **data}))


def _say(line: str) -> None:
    """Whoever reads may be gone, a closed terminal for one; what is told about must be done all the same."""
    with suppress(OSError, ValueError):
        click.echo(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
