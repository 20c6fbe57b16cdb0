"""Streams and events that do nothing but keep account: whether what touches memory is ordered, and by whom.

Each stream, and the host, has a vector clock. A launch comes after what the host has done; an event carries a stream's
clock to who waits for it. Two accesses to the same bytes, one of them a write, must be ordered by these clocks: on a
GPU they would otherwise run in either order. All is run at once, in the order of launches, so results are right; only
the account tells what a GPU might have done.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.backends.gpu_streams import Streams

Clock = dict[str, int]
_GRAIN = 4096  # bytes that are looked up together
_FRESH = ("empty", "zeros", "ones", "clone", "_to_copy", "full")


def learn(clock: Clock, other: Clock) -> None:
    for line, tick in other.items():
        clock[line] = max(clock.get(line, 0), tick)


@dataclass(frozen=True)
class Access:
    low: int
    high: int
    line: str
    tick: int
    writes: bool


@dataclass
class Account:
    """`races`: a sentence for each pair of accesses that nothing orders."""

    races: list[str] = field(default_factory=list)
    accesses: int = 0
    clocks: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    _owners: dict[int, str] = field(default_factory=dict)  # storage -> the stream that it was asked for on
    _borrowed: set[tuple[int, str]] = field(default_factory=set)  # storages, and other streams that used them
    _told: set[tuple[int, str]] = field(default_factory=set)
    _seen: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _lock: Any = field(default_factory=threading.RLock)
    _here: Any = field(default_factory=threading.local)

    @property
    def line(self) -> str:
        """The stream that this thread launches to, or the host."""
        return str(getattr(self._here, "line", "host"))

    @contextlib.contextmanager
    def on(self, line: str) -> Iterator[None]:
        before, self._here.line = self.line, line
        try:
            yield
        finally:
            self._here.line = before

    def tensor(self, tensor: Tensor, *, writes: bool) -> None:
        """This tensor is touched by what is launched now; by the host itself where no stream is current."""
        for low, high in _spans(tensor):
            self.bytes(low, high, writes=writes)
        owner = self._owners.get(tensor.untyped_storage().data_ptr())
        if owner not in (None, "host", self.line) and self.line != "host":
            self._borrowed.add((tensor.untyped_storage().data_ptr(), self.line))

    def host(self, view: Any, *, writes: bool) -> None:
        """The host touches memory that a memoryview or an array shows."""
        array = np.frombuffer(view, np.uint8)
        with self.on("host"):
            self.bytes(array.ctypes.data, array.ctypes.data + array.nbytes, writes=writes)

    def bytes(self, low: int, high: int, *, writes: bool) -> None:
        with self._lock:
            line = self.line
            clock = self.clocks[line]
            learn(clock, self.clocks["host"])
            clock[line] = clock.get(line, 0) + 1
            self.accesses += 1
            for grain in range(low // _GRAIN, (high - 1) // _GRAIN + 1):
                part = Access(max(low, grain * _GRAIN), min(high, (grain + 1) * _GRAIN), line, clock[line], writes)
                self._seen[grain] = [*self._compare(part, clock, self._seen[grain]), part]

    def _compare(self, now: Access, clock: Clock, before: list[Access]) -> list[Access]:
        """What is still to be compared with later ones."""
        kept = []
        for other in before:
            apart = other.high <= now.low or now.high <= other.low
            ordered = other.tick <= clock.get(other.line, 0)
            if not apart and not ordered and (now.writes or other.writes):
                kind = {True: "a write", False: "a read"}
                self.races.append(f"{kind[now.writes]} on {now.line} after {kind[other.writes]} on {other.line}")
            covered = now.low <= other.low and other.high <= now.high
            if not (covered and ordered and (now.writes or (not other.writes and now.line == other.line))):
                kept.append(other)
        return kept

    def wait(self, line: str) -> None:
        """The host waits for a stream."""
        learn(self.clocks["host"], self.clocks[line])

    def fresh(self, tensor: Tensor, *, of_host: bool = False) -> None:
        """Memory that nobody has touched; an allocator gives it out again for its own stream when it is free."""
        with self._lock:
            low = tensor.untyped_storage().data_ptr()
            high = low + tensor.untyped_storage().nbytes()
            for grain in range(low // _GRAIN, (high - 1) // _GRAIN + 1):
                self._seen[grain] = [one for one in self._seen[grain] if one.high <= low or high <= one.low]
            lost = {one for one in self._borrowed - self._told if one[0] == low}
            self.races += [f"memory that was given back is not recorded as used on {line}" for _, line in lost]
            self._borrowed, self._told = (
                {one for one in many if one[0] != low} for many in (self._borrowed, self._told)
            )
            self._owners[low] = "host" if of_host else self.line

    def record(self, tensor: Tensor, line: str) -> None:
        """The allocator is told that this stream uses the tensor too."""
        self._told.add((tensor.untyped_storage().data_ptr(), line))

    def check(self, lasting: Tensor) -> None:
        """`lasting` is never given back to the allocator."""
        for where, line in self._borrowed - self._told:
            if where != lasting.untyped_storage().data_ptr():
                self.races.append(f"memory that is not recorded as used on {line}")
        assert not self.races, self.races[:5]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Operators of this thread are in the account."""
        with _Watch(self):
            yield


def _spans(tensor: Tensor) -> list[tuple[int, int]]:
    if tensor.numel() == 0:
        return []
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())]
    with _disable_current_modes():
        return [span for part in tensor for span in _spans(part)]


class _Watch(TorchDispatchMode):
    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        name = func._schema.name.removeprefix("aten::")
        account = self._account
        out = func(*args, **kwargs)
        fresh = isinstance(out, Tensor) and any(name.startswith(one) for one in _FRESH)
        if fresh:
            account.fresh(out)
        if func.is_view or name.startswith("empty"):
            return out
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, Tensor):
                written = argument.alias_info is not None and argument.alias_info.is_write
                account.tensor(value, writes=written)
        if fresh:
            account.tensor(out, writes=True)
        return out


class Stream:
    def __init__(self, account: Account, name: str) -> None:
        self.account, self.name = account, name

    def wait_event(self, event: Event) -> None:
        learn(self.account.clocks[self.name], event.clock)

    def synchronize(self) -> None:
        self.account.wait(self.name)


class Event:
    def __init__(self, account: Account, hurries: bool) -> None:
        self._account, self._hurries = account, hurries
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        learn(self._account.clocks[stream.name], self._account.clocks["host"])
        self.clock = dict(self._account.clocks[stream.name])

    def query(self) -> bool:
        """Has it happened? As early as can be, or only once the host knows by other means."""
        known = self._account.clocks["host"]
        if self._hurries:
            learn(known, self.clock)
        return all(tick <= known.get(line, 0) for line, tick in self.clock.items())

    def synchronize(self) -> None:
        learn(self._account.clocks["host"], self.clock)


def accounted_streams(account: Account, patch: pytest.MonkeyPatch, *, hurries: bool) -> Streams:
    """The backend's own streams, over these."""
    names = iter(("compute", "outward", "inward"))
    patch.setattr(torch.cuda, "Stream", lambda _: Stream(account, next(names)))
    patch.setattr(torch.cuda, "Event", lambda **_: Event(account, hurries))
    patch.setattr(torch.cuda, "stream", lambda stream: account.on(stream.name))
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: account.record(tensor, stream.name))
    return Streams(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
