"""Which model is served, and whether a request can fit into its context, before anything is created."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict

from engine.tokens import ChatFormat, ToolSchemaError, tool_grammar
from runtime.api.documented import Page, refusals
from runtime.api.guard import Db, Tenant
from runtime.config import MessageIn, SessionConfig
from runtime.errors import InvalidRequest, NotFound, Unavailable
from runtime.generation import Sampling
from runtime.settings import ANY_IMAGE
from runtime.specs import tool_specs
from runtime.store import Database, fleet
from runtime.tools.egress import Egress
from runtime.tools.kinds import HttpTool, McpTool, SessionTool
from sandbox import EgressRefused
from sandbox.allow import uncovered

router = APIRouter(prefix="/v1/models", tags=["models"])


class ModelOut(BaseModel):
    """A model as OpenAI's clients expect it, with its engine's card beside."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [{"id": "qwen2.5-coder-0.5b-instruct", "object": "model", "created": 0, "owned_by": "tenuto"}]
        },
    )

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "tenuto"
    context_length: int


@dataclass(frozen=True)
class Served:
    """A model that a living node serves. `chat`: which format its tokens are counted by; None where the node is of a
    release that did not say, and only the node itself can tell what fits."""

    card: Mapping[str, Any]
    chat: str | None

    @property
    def name(self) -> str:
        return str(self.card["model"])

    @property
    def context_length(self) -> int:
        return int(self.card["context_length"])

    @property
    def external(self) -> bool:
        """Whether a model server counts the tokens, and ours are bytes."""
        return bool(self.card.get("kv") == "external")


async def served(db: Database) -> dict[str, Served]:
    """By name. Of nodes that serve the same one, the first that says how its tokens are counted."""
    found: dict[str, Served] = {}
    for node in await fleet.nodes(db):
        if node["alive"]:
            name = node["card"]["model"]
            if name not in found or found[name].chat is None:
                found[name] = Served(node["card"], node["chat"])
    return found


@router.get("", response_model=Page[ModelOut])
async def list_models(db: Db, tenant: Tenant) -> dict[str, Any]:
    """The models that live nodes serve, as OpenAI's clients expect them, with our card beside."""
    found = sorted((await served(db)).items())
    data = [{"id": name, **model.card} for name, model in found]
    return {"data": data, "first_id": found[0][0] if found else None, "last_id": found[-1][0] if found else None}


# Names as servers give them have slashes.
ModelName = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@~/-]+$")]


@router.get("/{model:path}", response_model=ModelOut, responses=refusals(404))
async def get_model(model: ModelName, db: Db, tenant: Tenant) -> dict[str, Any]:
    """One of them."""
    found = (await served(db)).get(model)
    if found is None:
        raise NotFound(f"the model {model!r} is not served here")
    return {"id": model, **found.card}


async def checked_model(db: Database, wanted: str) -> Served:
    """The model asked for (the served one if none was). Raises InvalidRequest, Unavailable."""
    found = await served(db)
    if not found:
        raise Unavailable("no node is up")
    if not wanted:
        return next(iter(found.values()))
    if wanted not in found:
        raise InvalidRequest(
            f"model: {wanted!r} is not served here; there is {', '.join(sorted(found))}",
            param="model",
            code="model_not_found",
        )
    return found[wanted]


async def ensure_tools_work(config: SessionConfig) -> None:
    """Raises InvalidRequest where a tool's schema can guide no model."""
    try:
        if specs := tool_specs(config):
            await asyncio.to_thread(tool_grammar, specs, "required")
    except ToolSchemaError as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from error
    for child in children_of(config):
        await ensure_tools_work(child)


async def ensure_answers_work(config: SessionConfig) -> None:
    """Raises InvalidRequest where no answer can have its form."""
    given = config.response_format
    if given is None:
        return
    try:
        await asyncio.to_thread(lambda: tool_grammar(tool_specs(config), "auto", given.form))
    except ToolSchemaError as error:
        raise InvalidRequest(f"response_format: {error}", param="response_format") from error


async def ensure_turn_works(config: SessionConfig, model: Served, message: MessageIn) -> None:
    """Raises InvalidRequest where what a message says for its turn cannot be."""
    if message.options is None:
        return
    turn = config.for_turn(message.kept["turn"])
    if turn.sampling.stop and turn.response_format is not None and turn.response_format.type != "text":
        raise InvalidRequest("options: an answer that a stop text can end may not have its response_format; use one")
    await ensure_answers_work(turn)
    ensure_tokens_exist(turn, model)


def ensure_tokens_exist(config: SessionConfig, model: Served) -> None:
    """Raises InvalidRequest where an option names a token that there is none of, or cannot be had of the model."""
    ensure_options_are_had(config, model)
    size = int(model.card["vocab_size"])
    for token in config.sampling.logit_bias:
        if int(token) >= size:
            raise InvalidRequest(
                f"sampling.logit_bias: there is no token {token}; those of {config.model} are 0 to {size - 1}",
                param="sampling.logit_bias",
            )


def ensure_options_are_had(config: SessionConfig, model: Served) -> None:
    """Raises InvalidRequest where the model's server takes no such option: none is left out in silence."""
    usual = Sampling()
    asked = {name for name in Sampling.model_fields if getattr(config.sampling, name) != getattr(usual, name)}
    if config.response_format is not None:
        asked.add(config.response_format.type)
    for name in model.card.get("refuses", ()):
        if name in asked:
            where = f"sampling.{name}" if name in Sampling.model_fields else "response_format"
            raise InvalidRequest(
                f"{where}: the server that runs {config.model} ({model.card['server']}) does not take"
                f" {name}; leave it out, or use a model that an engine of this installation runs",
                param=where,
                code="option_not_supported",
            )
    for child in children_of(config):
        ensure_options_are_had(child, model)


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


async def ensure_it_fits(
    request: Request, db: Database, config: SessionConfig, model: Served, *, content: str = "", used: int = 0
) -> None:
    """Raises InvalidRequest (context_length_exceeded) if the prompt leaves no room for an answer."""
    if model.chat is None or model.external:  # what fits there is for the server to say
        return
    chat = await request.app.state.chats.of(db, model.chat)
    # In a thread: a template is rendered by a process of its own, and a long text takes its time.
    tokens, room = await asyncio.to_thread(_prompt_tokens, chat, config, content, used), model.context_length
    request.app.state.counts.prompts += 1
    if tokens >= room:
        request.app.state.counts.prompts_refused += 1
        field = "content" if content else "system"
        raise InvalidRequest(
            f"{field}: the transcript would have {tokens} tokens, the context of {config.model} holds"
            f" {room}; send less",
            param=field,
            code="context_length_exceeded",
        )


def _prompt_tokens(chat: ChatFormat, config: SessionConfig, content: str, used: int) -> int:
    tokens = used or len(chat.opening(config.system, tool_specs(config)))
    return tokens + (len(chat.user(content)) if content else 0) + len(chat.assistant_open())
