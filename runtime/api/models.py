"""Which model is served, and whether a request can fit into its context, before anything is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from engine.tokens import ChatFormat, ToolSchemaError, load_chat_format, tool_grammar
from runtime.api.guard import Db, Tenant
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest, Unavailable
from runtime.settings import ANY_IMAGE
from runtime.specs import tool_specs
from runtime.store import Database, fleet
from runtime.tools.egress import Egress
from runtime.tools.kinds import HttpTool, McpTool, SessionTool
from sandbox import EgressRefused
from sandbox.allow import uncovered

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
async def list_models(db: Db, tenant: Tenant) -> dict[str, Any]:
    """The models that live nodes serve, as OpenAI's clients expect them, with our card beside."""
    cards = {node["card"]["model"]: node["card"] for node in await fleet.nodes(db) if node["alive"]}
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "tenuto", **card} for name, card in cards.items()]
    return {"object": "list", "data": data}


async def checked_model(db: Database, wanted: str) -> dict[str, Any]:
    """The card of the model asked for (of the served one if none was). Raises InvalidRequest, Unavailable."""
    cards = {node["card"]["model"]: node["card"] for node in await fleet.nodes(db) if node["alive"]}
    if not cards:
        raise Unavailable("no node is up")
    if not wanted:
        return dict(next(iter(cards.values())))
    if wanted not in cards:
        raise InvalidRequest(
            f"model: {wanted!r} is not served here; there is {', '.join(sorted(cards))}",
            param="model",
            code="model_not_found",
        )
    return dict(cards[wanted])


def ensure_tools_work(config: SessionConfig) -> None:
    """Raises InvalidRequest where a tool's schema can guide no model."""
    try:
        if specs := tool_specs(config):
            tool_grammar(specs, "required")
    except ToolSchemaError as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from error
    for child in children_of(config):
        ensure_tools_work(child)


def children_of(config: SessionConfig) -> list[SessionConfig]:
    """What the sessions are made of that run as tools of this one."""
    return [config.of_child(tool) for tool in config.declared if isinstance(tool, SessionTool)]


async def ensure_image(request: Request, db: Database, config: SessionConfig) -> None:
    """Raises InvalidRequest where the sandbox may not be of that image, or no live node can make one of it."""
    if config.image is None:
        return
    allowed: tuple[str, ...] = request.app.state.sandbox_images
    if ANY_IMAGE not in allowed and config.image not in allowed:
        raise InvalidRequest(
            f"image: {config.image!r} is none of the images that sandboxes may be made of here"
            f" (TENUTO_SANDBOX_IMAGES: {', '.join(allowed) or 'only the built-in one'})",
            param="image",
            code="image_not_allowed",
        )
    backends = {(node["sandbox"] or {}).get("backend") for node in await fleet.nodes(db) if node["alive"]}
    if "docker" not in backends:
        raise InvalidRequest(
            "image: images by name need a node whose sandboxes are Docker's; here is"
            f" {', '.join(sorted(filter(None, backends))) or 'none'}",
            param="image",
            code="image_not_allowed",
        )


def ensure_reachable(request: Request, config: SessionConfig) -> None:
    """Raises InvalidRequest where a host is not one that may be reached. Names are looked up at the call."""
    if beyond := uncovered(config.egress, request.app.state.sandbox_egress):
        raise InvalidRequest(
            f"egress: {beyond[0]} is not within the hosts that sandboxes may reach (TENUTO_SANDBOX_EGRESS_ALLOW)",
            param="egress",
            code="host_not_allowed",
        )
    egress: Egress = request.app.state.egress
    for tool in config.declared:
        url = tool.url if isinstance(tool, HttpTool | McpTool) else None
        try:
            if url is not None:
                egress.check(url)
        except EgressRefused as refused:
            raise InvalidRequest(f"tools: {tool.name}: {refused}", param="tools", code="host_not_allowed") from None
    for child in children_of(config):
        ensure_reachable(request, child)


def ensure_it_fits(
    request: Request, config: SessionConfig, card: dict[str, Any], *, content: str = "", used: int = 0
) -> None:
    """Raises InvalidRequest (context_length_exceeded) if the prompt leaves no room for an answer."""
    chat: ChatFormat = request.app.state.chat
    tokens = used or len(chat.opening(config.system, tool_specs(config)))
    tokens += len(chat.user(content)) if content else 0
    if tokens + len(chat.assistant_open()) >= card["context_length"]:
        field = "content" if content else "system"
        raise InvalidRequest(
            f"{field}: the transcript would have {tokens} tokens, the context of {config.model} holds"
            f" {card['context_length']}; send less",
            param=field,
            code="context_length_exceeded",
        )


def load_chat(model_path: Path) -> ChatFormat:
    return load_chat_format(model_path)[1]
