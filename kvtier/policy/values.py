"""What a policy sees, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.errors import TierUsageError


class Place(enum.StrEnum):
    """Where KV can lie, nearest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class State(enum.StrEnum):
    """What a session does. An approval or a pause ends when a person says so; a tool ends by itself."""

    RUNNING = "running"
    WAITING = "waiting"
    TOOL = "tool"
    APPROVAL = "approval"
    PAUSED = "paused"


class Reason(enum.StrEnum):
    """Why a policy is asked. `subject` is the session it happened to; for PRESSURE, the one that needs room."""

    TOOL_STARTED = "tool_started"
    TOOL_ENDED = "tool_ended"
    SCHEDULED = "scheduled"
    PRESSURE = "pressure"


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds to compute `tokens` of context on an idle device: `linear_s * n + square_s * n^2`.

    The square is attention. Fitted through two measured lengths by `through`.
    """

    linear_s: float
    square_s: float = 0.0

    @classmethod
    def through(cls, near: tuple[int, float], far: tuple[int, float]) -> Prefill:
        """Through two measurements (tokens, tokens per second), `near` the shorter."""
        (n, n_rate), (m, m_rate) = near, far
        if not 0 < n < m or min(n_rate, m_rate) <= 0:
            raise TierUsageError(f"cannot fit a prefill through {near} and {far}: lengths must grow, rates be positive")
        square_s = max(0.0, (1 / m_rate - 1 / n_rate) / (m - n))
        return cls(1 / n_rate - square_s * n, square_s)

    def seconds(self, tokens: int, after: int = 0) -> float:
        """To bring a context from `after` tokens to `tokens`."""
        return self.linear_s * (tokens - after) + self.square_s * (tokens * tokens - after * after)


@dataclass(frozen=True, slots=True)
class TierView:
    """A place and the link between it and the device.

    Bytes, bytes per second, seconds. `read_bps` is towards the device. `queued_s` is what the reading link has to do
    already. `tax` is the part of a transfer's time that the device loses to it.
    """

    place: Place
    capacity_bytes: int
    used_bytes: int
    read_bps: float = 0.0
    write_bps: float = 0.0
    latency_s: float = 0.0
    queued_s: float = 0.0
    tax: float = 0.0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def read_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / self.read_bps

    def write_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / self.write_bps


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session's KV.

    `born_s`: when the session began. `since_s`: when its present state began.
    `resident`: the device holds all of it. `copy`: the tier that holds tokens `copy_from` to `copy_to`, if any does;
    what lies before was dropped, what lies behind came later.
    `held`: running, being restored or pinned; never a victim on the device.
    """

    id: str
    tokens: int
    state: State
    since_s: float
    tool: str = ""
    timeout_s: float | None = None
    born_s: float = 0.0
    resident: bool = False
    copy: Place | None = None
    copy_from: int = 0
    copy_to: int = 0
    held: bool = False
    turn: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """All that a decision depends on, at one moment.

    `tiers`: device first. `need_bytes`: for PRESSURE, the room wanted on the device. `waiting`: how many wait for the
    device: a second of it costs each of them a second. `service_s`: what a turn takes of the device, on average.
    `line`: how many will be served before a session: one that waits now, or one in a pause if it came back now.
    """

    now_s: float
    reason: Reason
    subject: str
    sessions: Mapping[str, SessionView]
    tiers: tuple[TierView, ...]
    prefill: Prefill
    bytes_per_token: int
    waiting: int = 0
    service_s: float = 0.0
    need_bytes: int = 0
    line: Mapping[str, int] = field(default_factory=dict)
    by_place: Mapping[Place, TierView] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_place", {tier.place: tier for tier in self.tiers})

    def wait_s(self, session: SessionView) -> float:
        """How long it has to wait for the device, from now or, in a pause, from its return."""
        return self.line.get(session.id, self.waiting) * self.service_s

    def size(self, session: SessionView) -> int:
        return session.tokens * self.bytes_per_token

    def compute_s(self, start: int, stop: int) -> float:
        """What computing tokens `start` to `stop` costs everyone: whoever waits for the device waits for this too."""
        return self.prefill.seconds(stop, start) * (1 + self.waiting)

    def read_s(self, tokens: int, place: Place) -> float:
        """What reading from a tier costs: the reading itself, and the device's share of it to whoever waits."""
        tier = self.by_place[place]
        return tier.read_s(tokens * self.bytes_per_token) * (1 + tier.tax * self.waiting)

    def stream_s(self, tokens: int, place: Place) -> float:
        """What reading more of a copy costs that is read anyway: no latency."""
        tier = self.by_place[place]
        return tokens * self.bytes_per_token / tier.read_bps * (1 + tier.tax * self.waiting)

    def write_s(self, tokens: int, place: Place) -> float:
        """What writing costs: nobody waits for it, nor for its latency, but the device pays its tax."""
        tier = self.by_place[place]
        return tokens * self.bytes_per_token / tier.write_bps * tier.tax * (1 + self.waiting)

    def absent_s(self, session: SessionView) -> float:
        """What bringing it to the device costs, from what its copy holds."""
        if session.copy is None:
            return self.compute_s(0, session.tokens)
        read_s = self.read_s(session.copy_to - session.copy_from, session.copy)
        return self.compute_s(0, session.copy_from) + read_s + self.compute_s(session.copy_to, session.tokens)

    def below(self, place: Place) -> Place | None:
        """The next place down, None under the last."""
        places = [tier.place for tier in self.tiers]
        after = places.index(place) + 1
        return places[after] if after < len(places) else None


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a decision, in the order in which it is to be done.

    store: copy its tokens from `start` on to `place` (from the device if it is there, else from its tier) and forget
    any other tier's copy. trim: `place` forgets what lies before `start`. evict: `place` forgets all of it.
    prefetch: read what `place` holds to the device, compute the rest. recompute: compute all of it.
    `size_bytes`: what is moved, freed or computed.
    `predicted_s` is the expected cost in seconds of waiting, of everyone who waits.
    """

    kind: str
    session: str
    place: Place
    size_bytes: int
    predicted_s: float
    start: int = 0
