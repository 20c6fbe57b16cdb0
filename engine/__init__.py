"""Inference behind a token-level protocol. This face loads no torch; `open_engine` does, when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.catalogue import CatalogueEntry, models, pull, resolve
from engine.client import Done, EngineClient, Event, KvReceipt, KvState, Preempted, Prefill, Resumed, Tokens
from engine.errors import (
    REQUEST_CODES,
    BackendUnavailable,
    DownloadError,
    EngineError,
    EngineFault,
    EngineGone,
    ModelError,
    ModelFileError,
    ModelNotPulled,
    PageError,
    RequestError,
    ServerUnavailable,
    TemplateError,
    ToolSchemaError,
    UnknownModel,
    WeightsCacheError,
)
from engine.sampling import Logprob, Sampling, Speculation
from engine.wire import ModelCard

if TYPE_CHECKING:
    from engine.launch import Engine, EngineSettings, Progress


def open_engine(settings: EngineSettings, progress: Progress) -> Engine:
    """See `engine.launch.open_engine`."""
    from engine import launch

    return launch.open_engine(settings, progress)


__all__ = [
    "REQUEST_CODES",
    "BackendUnavailable",
    "CatalogueEntry",
    "Done",
    "DownloadError",
    "EngineClient",
    "EngineError",
    "EngineFault",
    "EngineGone",
    "Event",
    "KvReceipt",
    "KvState",
    "Logprob",
    "ModelCard",
    "ModelError",
    "ModelFileError",
    "ModelNotPulled",
    "PageError",
    "Preempted",
    "Prefill",
    "RequestError",
    "Resumed",
    "Sampling",
    "ServerUnavailable",
    "Speculation",
    "TemplateError",
    "Tokens",
    "ToolSchemaError",
    "UnknownModel",
    "WeightsCacheError",
    "models",
    "open_engine",
    "pull",
    "resolve",
]
