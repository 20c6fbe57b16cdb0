"""`/v1/conversations`: what was said, kept by us, for responses that go on in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import asyncpg
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from runtime.api.documented import Id, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for
from runtime.api.responses import AfterItem, Deleted, Few, ItemList, Order, page_of
from runtime.openai import ConversationIn, Items, ItemsIn, MetadataIn, input_items, listed
from runtime.store import responses
from runtime.store.sessions import new_id

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], responses=refusals(404))


class ConversationOut(BaseModel):
    """A conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ItemOut(BaseModel):
    """An item of a conversation."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


@router.post("", response_model=ConversationOut, responses=refusals(409))
async def create(body: ConversationIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Begin one, with what was said elsewhere if there is any."""
    items = _named(input_items(body.items, "items"))
    conversation_id = await id_for(request, db, tenant, "conv")
    await responses.add_conversation(db, tenant, conversation_id, body.metadata or {}, items)
    return _shown(await responses.conversation(db, tenant, conversation_id))


@router.get("/{conversation_id}", response_model=ConversationOut)
async def get(conversation_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """One of them."""
    return _shown(await responses.conversation(db, tenant, conversation_id))


@router.post("/{conversation_id}", response_model=ConversationOut)
async def update(conversation_id: Id, body: MetadataIn, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Replace its metadata."""
    await responses.conversation(db, tenant, conversation_id)
    await responses.set_metadata(db, conversation_id, body.metadata)
    return _shown(await responses.conversation(db, tenant, conversation_id))


@router.delete("/{conversation_id}", response_model=Deleted)
async def delete(conversation_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Forget it. Its responses stay."""
    await responses.conversation(db, tenant, conversation_id)
    await responses.remove_conversation(db, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted"}


@router.get("/{conversation_id}/items", response_model=ItemList)
async def list_items(
    conversation_id: Id, db: Db, tenant: Tenant, limit: Few = 20, order: Order = "desc", after: AfterItem = None
) -> dict[str, Any]:
    """What was said."""
    await responses.conversation(db, tenant, conversation_id)
    rows = await responses.items_of(db, conversation_id, limit + 1, after, order == "desc")
    found = page_of(listed([dict(row["item"]) for row in rows], "item"), limit, "asc", None)
    return found


@router.post("/{conversation_id}/items", response_model=ItemList)
async def add_items(conversation_id: Id, body: ItemsIn, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Say something in it, without a response."""
    await responses.conversation(db, tenant, conversation_id)
    named = _named(input_items(body.items, "items"))
    await responses.add_items(db, tenant, conversation_id, named)
    return page_of(listed([{**item, "id": item_id} for item_id, item in named], "item"), 100, "asc", None)


@router.get("/{conversation_id}/items/{item_id}", response_model=ItemOut)
async def get_item(conversation_id: Id, item_id: Id, db: Db, tenant: Tenant) -> Mapping[str, Any]:
    """One item."""
    await responses.conversation(db, tenant, conversation_id)
    return listed([await responses.item_of(db, conversation_id, item_id)], "item")[0]


@router.delete("/{conversation_id}/items/{item_id}", response_model=ConversationOut)
async def delete_item(conversation_id: Id, item_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Forget one item."""
    conversation = await responses.conversation(db, tenant, conversation_id)
    await responses.item_of(db, conversation_id, item_id)
    await responses.remove_item(db, conversation_id, item_id)
    return _shown(conversation)


def _named(items: Items) -> list[tuple[str, dict[str, Any]]]:
    return [(new_id({"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")), item) for item in items]


def _shown(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "id": row["conversation_id"],
        "created_at": int(row["created_at"].timestamp()),
        "metadata": row["metadata"],
    }
