"""What a node holds while it lives, given to every activity."""

from __future__ import annotations

from dataclasses import dataclass

from engine.client import EngineClient

from engine.tokens import ChatFormat
from kvtier import root_key
from runtime.store import Database, Owner, Session
from sandbox import BlobStore, Driver, Volume


@dataclass(frozen=True)
class Services:
    node_id: str
    boot: str
    db: Database
    engine: EngineClient
    chat: ChatFormat
    driver: Driver
    blobs: BlobStore
    volumes: tuple[Volume, ...]
    nvme_after_s: float

    def owner(self, session_id: str, epoch: int) -> Owner:
        return Owner(session_id, epoch, self.node_id, self.boot)

    def root_key(self, session: Session) -> bytes:
        fingerprint = bytes.fromhex(self.engine.card.fingerprint)
        return root_key(fingerprint=fingerprint, group=0, shard=0, shards=1, salt=session.salt)
