"""What a node holds while it lives, given to every activity."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from temporalio.client import Client

from engine.tokens import ChatFormat, Tokenizer
from runtime.engines import EngineLink
from runtime.store import Database, Owner
from runtime.tools.egress import Egress
from sandbox import BlobStore, Driver, Volume


@dataclass(frozen=True)
class Services:
    node_id: str
    boot: str
    db: Database
    engine: EngineLink
    tokenizer: Tokenizer
    chat: ChatFormat
    driver: Driver
    blobs: BlobStore
    volumes: tuple[Volume, ...]
    temporal: Client | None = None  # to tell other sessions at once; without it the reconciler does
    egress: Egress = field(default_factory=Egress)
    blob_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # see runtime.steps.collecting

    def owner(self, session_id: str, epoch: int) -> Owner:
        return Owner(session_id, epoch, self.node_id, self.boot)
