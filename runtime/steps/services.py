"""What a node holds while it lives, given to every activity."""

from __future__ import annotations

from dataclasses import dataclass, field

from temporalio.client import Client

from engine.tokens import ChatFormat, Tokenizer
from runtime.engines import EngineLink
from runtime.sealing import Sealer
from runtime.steps.blob_lock import BlobLock
from runtime.steps.coming_back import ComingBack
from runtime.steps.leaving import Leaving
from runtime.steps.recent import Recent
from runtime.store import Database, Owner
from runtime.tools.egress import Egress
from sandbox import BlobStore, Driver, Pool, Volume
from sandbox.allow import Entry
from sandbox.egress import Resolve, resolve


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
    blob_lock: BlobLock
    pool: Pool
    temporal: Client | None = None  # to tell other sessions at once; without it the reconciler does
    egress: Egress = field(default_factory=Egress)
    sandbox_egress: tuple[Entry, ...] = ()  # within which sessions may open their sandboxes
    lookup: Resolve = resolve  # the name service, for what leaves sandboxes
    sealer: Sealer = field(default_factory=Sealer)  # opens what the record keeps sealed
    kv_encryption: bool = False  # whether tiers are encrypted, by sharing domain
    shares: bool = False  # there is a store from which other nodes can take pages
    leaving: Leaving = field(default_factory=Leaving)
    coming_back: ComingBack = field(default_factory=ComingBack)
    recent: Recent = field(default_factory=Recent)

    def owner(self, session_id: str, epoch: int) -> Owner:
        return Owner(session_id, epoch, self.node_id, self.boot)
