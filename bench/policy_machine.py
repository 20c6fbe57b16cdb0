"""The machine that is simulated, and what is kept of each session on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bench.policy_load import Turn
from kvtier.policy import Place, Prefill, TierView

PREFILL = Prefill.through((512, 1500.0), (2048, 1150.0))


@dataclass(frozen=True)
class Hardware:
    """Of the real engine: SmolLM2-135M on two cores, bf16; memory and disk of the same machine. SI units.

    The taxes are assumed: a copy to or from host memory takes a quarter of the cores' time while it lasts.
    """

    device_bytes: int = 1 << 30
    host_bytes: int = 0
    nvme_bytes: int = 0
    prefill: Prefill = PREFILL
    decode_tps: float = 717.0
    bytes_per_token: int = 23_040
    host_bps: float = 8e9
    nvme_read_bps: float = 1.7e9
    nvme_write_bps: float = 1.9e9
    host_tax: float = 0.25
    nvme_tax: float = 0.05
    host_latency_s: float = 2e-4
    nvme_latency_s: float = 1e-3

    def faster(self, times: float) -> Hardware:
        """A machine of that many times every rate: the same one, seen by tools that are that many times slower."""
        prefill = Prefill(self.prefill.linear_s / times, self.prefill.square_s / times)
        rates = ("decode_tps", "host_bps", "nvme_read_bps", "nvme_write_bps")
        return replace(self, prefill=prefill, **{name: getattr(self, name) * times for name in rates})

    def sized(self, device_bytes: float, tier_bytes: float) -> Hardware:
        """A quarter of the tiers' bytes is host memory."""
        sizes = (int(device_bytes), int(tier_bytes / 4), int(tier_bytes * 3 / 4))
        return replace(self, device_bytes=sizes[0], host_bytes=sizes[1], nvme_bytes=sizes[2])

    def tiers(self) -> list[TierView]:
        found = [TierView(Place.DEVICE, self.device_bytes, 0)]
        if self.host_bytes:
            speeds = (self.host_bps, self.host_bps, self.host_latency_s)
            found.append(TierView(Place.HOST, self.host_bytes, 0, *speeds, tax=self.host_tax))
        if self.nvme_bytes:
            speeds = (self.nvme_read_bps, self.nvme_write_bps, self.nvme_latency_s)
            found.append(TierView(Place.NVME, self.nvme_bytes, 0, *speeds, tax=self.nvme_tax))
        return found


@dataclass
class Link:
    """One direction of a tier's link."""

    free_at: float = 0.0
    moved_bytes: int = 0

    def book(self, now_s: float, takes_s: float, size_bytes: int) -> float:
        self.free_at = max(self.free_at, now_s) + takes_s
        self.moved_bytes += size_bytes
        return self.free_at


@dataclass
class Slot:
    """One session after another. `index` is the turn under way or, in a pause, the one that comes.

    Before its turn, tokens up to `head` and from `tail` on are to be computed again; those between are there. `gaps`
    are what is still to be computed of a turn that was begun. `promoted_bytes` were read back and not used yet.
    """

    turns: list[Turn]
    following: Iterator[list[Turn]] | None
    index: int = 0
    ready_s: float = 0.0
    copy_ready_s: float = 0.0
    head: int = 0
    tail: int = 0
    overtaken: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    served_s: float = 0.0
    promoted_bytes: int = 0

    @property
    def turn(self) -> Turn:
        return self.turns[self.index]


@dataclass
class Outcome:
    """What was measured. `waited_s`: all the time that sessions spent waiting for a first token, summed.

    `promoted_unused_bytes` were read to the device and left it before a turn used them; `promoted_bytes` were used.
    """

    waited_s: float = 0.0
    firsts: int = 0
    recomputed_tokens: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    promoted_bytes: int = 0
    promoted_unused_bytes: int = 0
    turns: int = 0
    events: list[tuple[str, float]] = field(default_factory=list)

    @property
    def thrash(self) -> float:
        """Promoted and not used, over promoted."""
        promoted = self.promoted_bytes + self.promoted_unused_bytes
        return self.promoted_unused_bytes / promoted if promoted else 0.0

    @property
    def mean_wait_s(self) -> float:
        return self.waited_s / self.firsts
