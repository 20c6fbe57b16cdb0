"""How a stack is opened: sizes, places, and what is optional."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvtier.codec import CodecConfig
from kvtier.errors import TierConfigError
from kvtier.objects import Objects


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket of an S3-compatible store that honours `If-None-Match: *`. Credentials come the usual AWS ways.

    Needs the extra `tenuto-server[s3]`. Names of objects begin with `prefix`.
    """

    bucket: str
    prefix: str = "tenuto/"
    endpoint_url: str | None = None
    region: str = "us-east-1"
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The tier that several machines share: a directory of a shared file system, a bucket, or any `Objects`.

    `budget_bytes` bounds what lies there as far as the last listing knows: with several writers it may be passed
    by what they write within `refresh_s`. A page is removed at the earliest `grace_s` after it was marked. The
    lease to remove passes on when its holder has been silent for `lease_s`.
    """

    place: Path | S3Place | Objects
    budget_bytes: int
    grace_s: float = 60.0
    refresh_s: float = 60.0
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.grace_s, self.refresh_s, self.lease_s) < 0:
            raise TierConfigError("grace_s, refresh_s and lease_s are seconds; none can be negative")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Sizes are bytes; a path of None or a budget of 0 turns that tier off.

    `host_bytes` bounds the arena file, `nvme_bytes` everything under `nvme_dir`, quarantine included. A get
    waits `read_deadline_s` for the next read of a tier to come back; what has not come by then is a miss.
    `read_threads` NVMe reads are in flight at once.
    `codec` applies to the tiers below the host. `direct` reads NVMe past the page cache where that is possible.
    """

    page_bytes: int
    fingerprint: bytes
    host_path: Path | None
    host_bytes: int
    nvme_dir: Path | None
    nvme_bytes: int
    io_threads: int = 4
    read_threads: int = 8
    shared: SharedConfig | None = None
    codec: CodecConfig = field(default_factory=CodecConfig)
    read_deadline_s: float = 10.0
    direct: bool = True

    def __post_init__(self) -> None:
        if self.page_bytes < 1:
            raise TierConfigError(f"page_bytes is {self.page_bytes}; a page has at least one byte")
        if not self.fingerprint:
            raise TierConfigError("fingerprint is empty; pages of different models would be mixed up")
        for name, threads in (("io_threads", self.io_threads), ("read_threads", self.read_threads)):
            if not 1 <= threads <= 64:
                raise TierConfigError(f"{name} is {threads}; use 1 to 64")
        if self.read_deadline_s <= 0:
            raise TierConfigError(f"read_deadline_s is {self.read_deadline_s}; reads need more than no time")
        shared_bytes = 0 if self.shared is None else self.shared.budget_bytes
        for name, size in (
            ("host_bytes", self.host_bytes),
            ("nvme_bytes", self.nvme_bytes),
            ("shared.budget_bytes", shared_bytes),
        ):
            if size < 0:
                raise TierConfigError(f"{name} is {size}; a budget cannot be negative")
