"""The values that cross the face."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kvtier.errors import TierConfigError


class Tier(enum.StrEnum):
    """Where bytes lie, nearest first."""

    HOST = "host"
    NVME = "nvme"


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

    payload: bytes | bytearray
    tier: Tier


@dataclass(frozen=True, slots=True)
class TierCounts:
    """One tier now (pages, used_bytes) and since it was opened (the rest)."""

    pages: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    deleted: int = 0
    adopted: int = 0
    quarantined: int = 0
    foreign: int = 0
    io_errors: int = 0
    swept: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of both tiers; a tier that is off counts zero."""

    host: TierCounts
    nvme: TierCounts


@dataclass(frozen=True, slots=True)
class TierConfig:
    """How a stack is opened. Sizes are bytes; a path of None or a budget of 0 turns that tier off.

    `host_bytes` bounds the arena file, `nvme_bytes` everything under `nvme_dir`, quarantine included.
    """

    page_bytes: int
    fingerprint: bytes
    host_path: Path | None
    host_bytes: int
    nvme_dir: Path | None
    nvme_bytes: int
    io_threads: int = 4

    def __post_init__(self) -> None:
        if self.page_bytes < 1:
            raise TierConfigError(f"page_bytes is {self.page_bytes}; a page has at least one byte")
        if not self.fingerprint:
            raise TierConfigError("fingerprint is empty; pages of different models would be mixed up")
        if not 1 <= self.io_threads <= 64:
            raise TierConfigError(f"io_threads is {self.io_threads}; use 1 to 64")
        for name, size in (("host_bytes", self.host_bytes), ("nvme_bytes", self.nvme_bytes)):
            if size < 0:
                raise TierConfigError(f"{name} is {size}; a budget cannot be negative")
