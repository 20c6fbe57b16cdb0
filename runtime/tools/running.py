"""One run of a call, whichever kind its tool is of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.tools import http, mcp
from runtime.tools.catalog import Known
from runtime.tools.egress import Egress
from runtime.tools.kinds import SECRET_LEAST, CommandTool, HttpTool, McpTool, SessionTool, texts
from runtime.tools.mcp_inside import InsideServer
from runtime.tools.mcp_outside import OutsideServer
from runtime.tools.outcome import Outcome
from runtime.unwanted import is_unwanted
from sandbox import TOOLS, BadArguments, EgressRefused, Sandbox, SandboxLost, Shell, tool_argv

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Under which name a call runs, within which limits, and what is known beforehand.

    `again`: the sandbox was given this call before, and its journal knows of it. `handshake` and `greeting`: see
    InsideServer.
    """

    key: str
    epoch: int
    again: bool
    timeout_s: float
    output_bytes: int
    handshake: dict[str, object] | None
    greeting: asyncio.Lock


def check(egress: Egress, known: Known, arguments: Arguments) -> None:
    """Raises BadArguments or EgressRefused: what is told to the model as a refusal before anything has begun."""
    tool = known.declared
    if isinstance(tool, str):
        tool_argv(tool, arguments)
    elif isinstance(tool, SessionTool):
        if not isinstance(arguments.get("task"), str) or not arguments["task"].strip():
            raise BadArguments("task must be a text that says what to do")
    elif isinstance(tool, HttpTool):
        url, _ = http.filled(tool.url, arguments)
        egress.check(url)
    elif isinstance(tool, McpTool) and tool.url is not None:
        egress.check(tool.url)


async def run_outside(egress: Egress, known: Known, arguments: Arguments, place: Place) -> Outcome:
    tool = known.declared
    if isinstance(tool, HttpTool):
        timed = tool.model_copy(update={"timeout_s": place.timeout_s})
        return await http.request(egress, timed, arguments, place.key, place.output_bytes)
    assert isinstance(tool, McpTool)
    server = OutsideServer(egress, tool.model_copy(update={"timeout_s": place.timeout_s}))
    try:
        return await _of_server(server, known, arguments, place)
    except EgressRefused as refused:
        return Outcome.refused(str(refused))


async def run_inside(sandbox: Sandbox, known: Known, arguments: Arguments, place: Place) -> Outcome:
    """Starts the call, or re-attaches to it. Raises SandboxLost."""
    tool = known.declared
    if isinstance(tool, McpTool):
        return await _of_server(_inside(sandbox, tool, place), known, arguments, place)
    if _is_stateful(known):
        return await _in_shell(sandbox, arguments["command"], place)
    env: Mapping[str, str] = {}
    keep_background = isinstance(tool, str)  # what a model puts in the background is meant to stay
    if isinstance(tool, CommandTool):
        argv, stdin, env = tool.command, json.dumps(dict(arguments)).encode(), texts(tool.env)
        keep_background = tool.keep_background
    else:
        assert isinstance(tool, str)
        argv, stdin = tool_argv(tool, arguments)
    secrets = {name: value for name, value in env.items() if len(value.strip()) >= SECRET_LEAST}
    running = await sandbox.start(
        place.key,
        argv,
        epoch=place.epoch,
        stdin=stdin,
        env={**{name: env[name] for name in env.keys() - secrets.keys()}, "TENUTO_CALL_KEY": place.key},
        timeout_s=place.timeout_s,
        output_bytes=place.output_bytes,
        keep_background=keep_background,
        secrets=secrets,
    )
    try:
        result = await running.result()
    except asyncio.CancelledError:
        if is_unwanted():
            await asyncio.shield(sandbox.kill(place.key))
        raise
    if result.reason == "lost":
        raise SandboxLost(f"the sandbox went away while {known.spec.name} ran in it")
    return Outcome.of_sandbox(result, kept=keep_background)


def _is_stateful(known: Known) -> bool:
    return isinstance(known.declared, str) and TOOLS[known.declared].stateful


async def _in_shell(sandbox: Sandbox, command: str, place: Place) -> Outcome:
    shell = Shell(sandbox)
    try:
        ran = await shell.run(place.key, command, timeout_s=place.timeout_s, output_bytes=place.output_bytes)
    except asyncio.CancelledError:
        if is_unwanted():
            await asyncio.shield(shell.stop(place.key))
        raise
    return Outcome.of_shell(ran)


async def stop_inside(sandbox: Sandbox, known: Known, place: Place) -> None:
    """Ends the call if it still runs; a server ends with the call that it was given."""
    if isinstance(known.declared, McpTool):
        await _inside(sandbox, known.declared, place).stop(place.key)
    elif _is_stateful(known):
        await Shell(sandbox).stop(place.key)
    else:
        await sandbox.kill(place.key)


def _inside(sandbox: Sandbox, tool: McpTool, place: Place) -> InsideServer:
    return InsideServer(
        sandbox, tool.model_copy(update={"timeout_s": place.timeout_s}), place.handshake, place.greeting
    )


async def _of_server(server: mcp.Server, known: Known, arguments: Arguments, place: Place) -> Outcome:
    return await mcp.called(
        server, known.remote, arguments, key=place.key, again=place.again, limit_bytes=place.output_bytes
    )
