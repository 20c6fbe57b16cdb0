"""What kind of server answers, which model it serves, and how long that model's context is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import RequestError
from engine.external.kinds import KINDS, Kind
from engine.external.remote import Remote


@dataclass(frozen=True)
class Served:
    kind: Kind
    model: str
    context_length: int


async def look(remote: Remote, model: str | None = None, kind: str = "auto", context: int | None = None) -> Served:
    """`model`: which of several; `context`: what to go by where the server does not say, or says too much.

    Raises RequestError where something is missing that somebody must say, ServerUnavailable.
    """
    entries = await _entries(remote, known=model is not None)
    entry = _chosen(entries, model, remote.place.url)
    name = model if model is not None else str(entry["id"])
    props = await _asked(remote, "/props") if kind in ("auto", "llamacpp") else None
    found = KINDS[kind] if kind != "auto" else await _kind(remote, entry, props)
    length = context or _context(entry, props)
    if length is None:
        raise RequestError(
            "server_refused",
            f"{remote.place.url} does not say how long the context of {name!r} is; set TENUTO_OPENAI_CONTEXT",
        )
    return Served(found, name, length)


async def _entries(remote: Remote, *, known: bool) -> list[Mapping[str, Any]]:
    try:
        told = await remote.get(f"{remote.place.url}/models")
    except RequestError as error:
        if known and "404" in str(error):  # a server without a list may serve it all the same
            return []
        raise
    data = told.get("data") if isinstance(told, Mapping) else None
    if not isinstance(data, list):
        raise RequestError("bad_answer", f"{remote.place.url}/models is no list of models; is it the right address?")
    return [one for one in data if isinstance(one, Mapping) and isinstance(one.get("id"), str) and one["id"]]


def _chosen(entries: list[Mapping[str, Any]], model: str | None, url: str) -> Mapping[str, Any]:
    names = sorted(str(one["id"]) for one in entries)
    some = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    if model is None:
        if len(entries) == 1:
            return entries[0]
        raise RequestError("server_refused", f"{url} serves {some or 'no model'}; choose one: openai:{url}#MODEL")
    if entries and model not in names:
        raise RequestError("server_refused", f"{url} does not serve {model!r}; it serves {some}")
    return next((one for one in entries if one["id"] == model), {})


async def _kind(remote: Remote, entry: Mapping[str, Any], props: Any) -> Kind:
    """By what its list says, else by what only one kind answers."""
    owner = str(entry.get("owned_by", "")).replace(".", "").lower()
    if owner in ("vllm", "sglang", "llamacpp", "tenuto"):
        return KINDS[owner]
    if (urlsplit(remote.place.url).hostname or "").endswith("openai.com"):
        return KINDS["openai"]
    if isinstance(props, Mapping) and "default_generation_settings" in props:
        return KINDS["llamacpp"]
    if isinstance(await _asked(remote, "/get_server_info"), Mapping):
        return KINDS["sglang"]
    version = await _asked(remote, "/version")
    return KINDS["vllm" if isinstance(version, Mapping) and set(version) == {"version"} else "plain"]


async def _asked(remote: Remote, path: str) -> Any:
    """None where there is nothing; a server that is away is."""
    try:
        return await remote.get(remote.place.root + path)
    except RequestError:
        return None


def _context(entry: Mapping[str, Any], props: Any) -> int | None:
    meta = entry.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    settings = props.get("default_generation_settings") if isinstance(props, Mapping) else None
    slot = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    told = (
        entry.get("max_model_len"),
        slot,
        meta.get("n_ctx"),
        meta.get("n_ctx_train"),
        entry.get("context_length"),
        entry.get("context_window"),
    )
    return next((one for one in told if type(one) is int and 0 < one < 1 << 31), None)
