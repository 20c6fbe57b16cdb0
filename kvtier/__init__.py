"""Pages of KV as keyed, verified bytes, in tiers that outlive their process."""

from kvtier.errors import (
    TierBusyError,
    TierClosedError,
    TierConfigError,
    TierError,
    TierFault,
    TierIntegrityError,
    TierUsageError,
)
from kvtier.fileops import Io, RealIo
from kvtier.keys import PageKey, next_key, page_keys, root_key
from kvtier.stack import TierStack
from kvtier.values import Loaded, Receipt, Tier, TierConfig, TierCounts, TierStats

__all__ = [
    "Io",
    "Loaded",
    "PageKey",
    "RealIo",
    "Receipt",
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
    "next_key",
    "page_keys",
    "root_key",
]
