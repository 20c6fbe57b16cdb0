"""The values that cross the face."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kvtier.counts import TierCounts
from kvtier.fileops import Buffer


class Tier(enum.StrEnum):
    """Where bytes lie, nearest first."""

    HOST = "host"
    NVME = "nvme"
    SHARED = "shared"


Status: TypeAlias = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a request.

    accepted: all of it. clipped: a part. deferred: nothing yet, ask again. rejected: nothing, see detail.
    missing: none of the keys is known. `pages` counts the requested pages that are now as asked (also those
    that already were); `bytes` counts payload bytes that this call moved or freed.
    """

    status: Status
    pages: int
    bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome of a batch in one tier: pages now there, those written by this call, and why not all."""

    present: int
    written: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified page; the payload is the caller's own copy, `page_bytes` long."""

    payload: Buffer
    tier: Tier


Wanted: TypeAlias = tuple[bytes, memoryview]  # a key, and the memory that its page is to be read into


@dataclass(frozen=True, slots=True)
class Filled:
    """What became of memory that one tier was to fill.

    `keys`: it holds these pages, verified. `late`: a read that was given up may still write into it, until the future
    is done. All other memory is nobody's: it may hold anything.
    """

    keys: set[bytes]
    late: dict[bytes, Future[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Landed:
    """As `Filled`, with the tier that each page came from."""

    tiers: dict[bytes, Tier]
    late: dict[bytes, Future[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of the tiers; a tier that is off counts zero."""

    host: TierCounts
    nvme: TierCounts
    shared: TierCounts = field(default_factory=TierCounts)
