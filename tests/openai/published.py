"""The published Open Responses document, and whether what we answer is of its schemas."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

DOCUMENT = Path(__file__).with_name("openresponses.json")
OURS = ("mcp_call", "mcp_approval_request")  # of OpenAI's own document; the open one leaves such items to extensions


@functools.cache
def _document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DOCUMENT.read_text())
    return read


@functools.cache
def _validator(name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": _document()["components"]}
    return jsonschema.Draft202012Validator(schema)


@functools.cache
def _events() -> dict[str, str]:
    """Schema names by the type of the event."""
    found = {}
    for name, schema in _document()["components"]["schemas"].items():
        if name.endswith("StreamingEvent"):
            (kind,) = schema["properties"]["type"]["enum"]
            found[kind] = name
    return found


def check_response(response: Mapping[str, Any]) -> None:
    """Raises ValidationError."""
    _validator("ResponseResource").validate(_as_published(response))


def check_event(event: Mapping[str, Any]) -> None:
    """Raises ValidationError; KeyError for an event that the document does not know."""
    kind = event["type"]
    if kind.startswith("response.mcp_call") or event.get("item", {}).get("type") in OURS:
        return
    if "response" in event:
        event = {**event, "response": _as_published(event["response"])}
    _validator(_events()[kind]).validate(event)


def _as_published(response: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is OpenAI's own. The document admits no schema of an answer but null; clients send objects."""
    form = response["text"]["format"]
    if form["type"] == "json_schema":
        assert isinstance(form["schema"], dict)
        form = {**form, "schema": None}
    return {
        **response,
        "output": [item for item in response["output"] if item["type"] not in OURS],
        "tools": [tool for tool in response["tools"] if tool["type"] == "function"],
        "text": {**response["text"], "format": form},
    }
