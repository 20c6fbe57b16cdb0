"""Pages of KV as keyed, verified bytes, in tiers that outlive their process."""

from kvtier.audit import Audit, Finding, Flaw
from kvtier.codec import CodecConfig, Compression, DomainKey, KeyRing
from kvtier.collect import Collected, References
from kvtier.config import S3Place, SharedConfig, TierConfig
from kvtier.counts import TierCounts
from kvtier.errors import (
    TierBusyError,
    TierClosedError,
    TierConfigError,
    TierError,
    TierFault,
    TierIntegrityError,
    TierUsageError,
)
from kvtier.fakes import MemoryObjects, MemoryStore
from kvtier.fileops import Io, RealIo
from kvtier.keys import PageKey, next_key, page_keys, root_key
from kvtier.objects import Objects
from kvtier.speed import ReadSpeed
from kvtier.stack import TierStack
from kvtier.store import PageStore
from kvtier.stripes import Stripes
from kvtier.values import Filled, Landed, Loaded, Receipt, Stored, Tier, TierStats, Wanted

__all__ = [
    "Audit",
    "CodecConfig",
    "Collected",
    "Compression",
    "DomainKey",
    "Filled",
    "Finding",
    "Flaw",
    "Io",
    "KeyRing",
    "Landed",
    "Loaded",
    "MemoryObjects",
    "MemoryStore",
    "Objects",
    "PageKey",
    "PageStore",
    "ReadSpeed",
    "RealIo",
    "Receipt",
    "References",
    "S3Place",
    "SharedConfig",
    "Stored",
    "Stripes",
    "Tier",
    "TierBusyError",
    "TierClosedError",
    "TierConfig",
    "TierConfigError",
    "TierCounts",
    "TierError",
    "TierFault",
    "TierIntegrityError",
    "TierStack",
    "TierStats",
    "TierUsageError",
    "Wanted",
    "next_key",
    "page_keys",
    "root_key",
]
