"""Ask a session's tool servers what they offer: once, before its first think."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from engine.tokens import ToolSchemaError, ToolSpec, tool_grammar
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps.boxes import open_box
from runtime.steps.services import Services
from runtime.steps.unsealing import Unopened, opened
from runtime.steps.way_out import WayOut
from runtime.store import listings
from runtime.store.values import Attempt, Event, Owner
from runtime.tools.catalog import NO_LISTINGS, Catalog, Listings
from runtime.tools.kinds import McpTool
from runtime.tools.mcp import McpFault, Server, listed
from runtime.tools.mcp_inside import InsideServer
from runtime.tools.mcp_outside import OutsideServer
from runtime.tools.redacting import Redactor
from sandbox import EgressRefused, snapshots

MAX_OFFERED = 64  # tools of one server
MAX_SCHEMA_CHARS = 32_768
_CALLABLE = re.compile(r"[a-zA-Z0-9_-]+")


async def catalog(s: Services, session_id: str, config: SessionConfig) -> tuple[Catalog, Listings]:
    """The session's tools, with what its servers said that they offer."""
    known = (await listings.of(s.db, session_id) if config.servers else None) or NO_LISTINGS
    return catalog_of(s, config, known), known


def catalog_of(s: Services, config: SessionConfig, known: Listings = NO_LISTINGS) -> Catalog:
    return Catalog(config, known, leads_out=bool(config.egress) or any(not each.read_only for each in s.volumes))


async def ensure_listed(s: Services, owner: Owner, attempt: Attempt, config: SessionConfig) -> None:
    """Ask every server that was not asked yet, and write down what all nodes are to believe.

    Raises InvalidRequest where one cannot be reached or offers what guides no model.
    """
    if not config.servers or await listings.of(s.db, owner.session_id) is not None:
        return
    found: dict[str, Any] = {}
    told: list[Event] = []
    values = await opened(s, attempt.session.tenant_id, config, using=True)
    for tool in config.servers:
        try:
            plain = values.tool(tool)
        except Unopened as error:
            raise InvalidRequest(f"tools: {tool.name}: {error}") from None
        assert isinstance(plain, McpTool)
        async with _server(s, owner, attempt, config, plain) as server:
            speaker = f"listing/{owner.epoch}/{attempt.attempt_no}"
            found[tool.name], event = await _ask(plain, server, speaker, values.redactor)
            told.append(event)
    try:
        await asyncio.to_thread(tool_grammar, Catalog(config, found).specs, "auto")
    except ToolSchemaError as error:
        raise InvalidRequest(f"tools: {error}; pick some of a server's tools by its `tools`") from None
    await listings.keep(s.db, owner, attempt.step_no, found, told)


@contextlib.asynccontextmanager
async def _server(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, tool: McpTool
) -> AsyncIterator[Server]:
    if tool.url is not None:
        yield OutsideServer(s.egress, tool)
        return
    async with s.blob_lock:  # nothing names the first workspace yet
        files = {name: text.encode() for name, text in config.files.items()}
        root = await asyncio.to_thread(snapshots.seed, files, s.blobs)
        _, sandbox = await open_box(s, owner, attempt, config, root)
    way_out = WayOut(s, owner, attempt.step_no, config)
    try:
        await way_out.open(sandbox)
        yield InsideServer(sandbox, tool, None, asyncio.Lock())
        await way_out.tell()
    finally:
        await way_out.close()
        await sandbox.close()


async def _ask(tool: McpTool, server: Server, speaker: str, redactor: Redactor) -> tuple[dict[str, Any], Event]:
    try:
        handshake, offered = await listed(server, speaker)
    except (McpFault, EgressRefused) as fault:
        why = redactor.text(str(fault))
        raise InvalidRequest(f"tools: the server {tool.name!r} did not say what it offers: {why}") from None
    handshake, offered = redactor.json(handshake), redactor.json(offered)
    kept, left_out = await asyncio.to_thread(_usable, tool, offered)
    if tool.tools is not None and (missing := set(tool.tools) - {each["name"] for each in kept}):
        why = "; ".join(f"{each['name']}: {each['why']}" for each in left_out if each["name"] in missing)
        raise InvalidRequest(
            f"tools: the server {tool.name!r} does not offer {', '.join(sorted(missing))} ({why or 'not in its list'})"
        )
    names = [tool.full_name(each["name"]) for each in kept]
    event = Event("tools.listed", {"server": tool.name, "tools": names, "left_out": left_out})
    return {"handshake": handshake, "tools": kept}, event


def _usable(tool: McpTool, offered: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What can be offered to a model, and what cannot be, with the reason."""
    kept: dict[str, dict[str, Any]] = {}
    left_out = []
    for each in offered:
        name = each["name"]
        if tool.tools is not None and name not in tool.tools:
            continue
        why = "its name stands twice" if name in kept else _fault(tool, each)
        if why is None and len(kept) == MAX_OFFERED:
            why = f"a server's first {MAX_OFFERED} tools are taken"
        if why is None:
            kept[name] = each
        else:
            left_out.append({"name": name[:200], "why": why})
    return list(kept.values()), left_out[:MAX_OFFERED]


def _fault(tool: McpTool, offered: dict[str, Any]) -> str | None:
    if not _CALLABLE.fullmatch(offered["name"]):
        return "its name has characters other than letters, digits, '_' and '-'"
    if len(json.dumps(offered["parameters"])) > MAX_SCHEMA_CHARS:
        return f"its schema is longer than {MAX_SCHEMA_CHARS} characters"
    try:
        spec = ToolSpec(tool.full_name(offered["name"]), offered["description"], offered["parameters"])
        tool_grammar([spec], "required")
    except ToolSchemaError as error:
        return str(error)
    return None
