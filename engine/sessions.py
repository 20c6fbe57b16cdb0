"""What the engine remembers of sessions: their epochs, and the keys of the pages that are theirs. No torch, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.errors import RequestError
from engine.kvcall import PauseHint
from kvtier import Tier

_MAX_EPOCHS = 100_000


@dataclass
class SessionKv:
    """Pages of one session after its latest generation.

    tokens: those whose KV was computed. keys: the page chain of exactly these tokens, the last one possibly of a
    partial page.
    every_key: all keys that were ever this session's, so that a drop can delete branches it left behind.
    pinned_only: where `pinned`, the keys that are to be held; None for all, those to come included.
    pause: why it waits, while it does. since_s: when that began. copy, copy_to: the tier that was last seen to hold its
    first `copy_to` tokens, a hint.
    """

    name: str
    salt_id: bytes
    root: bytes
    tokens: tuple[int, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    every_key: set[bytes] = field(default_factory=set)
    pinned_blocks: list[int] = field(default_factory=list)
    pinned: bool = False
    pinned_only: set[bytes] | None = None
    pin_until_s: float | None = None
    pause: PauseHint | None = None
    since_s: float = 0.0
    born_s: float = 0.0
    turns: int = 0
    copy: Tier | None = None
    copy_to: int = 0

    @property
    def pinned_keys(self) -> list[bytes]:
        """Those of its pages that a pin is to hold."""
        return self.keys if self.pinned_only is None else [key for key in self.keys if key in self.pinned_only]


class Sessions:
    """Records by name, holder counts by key, and the highest epoch seen per session."""

    def __init__(self) -> None:
        self._records: dict[str, SessionKv] = {}
        self._holders: dict[bytes, int] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> SessionKv | None:
        return self._records.get(name)

    def all(self) -> list[SessionKv]:
        return list(self._records.values())

    def open(self, name: str, salt_id: bytes, root: bytes) -> SessionKv:
        """The record of a session, made at its first use. Another salt under the same name is refused."""
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = SessionKv(name, salt_id, root)
        elif record.root != root:
            raise RequestError("bad_request", f"session {name!r} was used with another salt; drop it first")
        return record

    def fence(self, name: str, epoch: int) -> bool:
        """Note the epoch. True if it is higher than any before; RequestError (stale_epoch) if it is lower."""
        known = self._epochs.get(name)
        if known is not None and epoch < known:
            raise RequestError(
                "stale_epoch", f"session {name!r} is at epoch {known}; a call of epoch {epoch} came too late"
            )
        self._epochs[name] = epoch
        self._epochs.move_to_end(name)
        if len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)
        return known is not None and epoch > known

    def epoch(self, name: str) -> int:
        """The highest epoch seen of a session; 0 of one that was never seen."""
        return self._epochs.get(name, 0)

    def update(self, record: SessionKv, tokens: tuple[int, ...], keys: list[bytes]) -> list[bytes]:
        """Set the session's chain.

        Returns keys that are nobody's any more: partial pages which the new chain grew over.
        """
        grown = record.tokens == tokens[: len(record.tokens)]
        superseded = set(record.keys) - set(keys) if grown else set()
        fresh = set(keys) - record.every_key
        for key in fresh:
            self._holders[key] = self._holders.get(key, 0) + 1
        record.every_key |= fresh
        record.tokens, record.keys = tokens, list(keys)
        return self._let_go(record, superseded)

    def drop(self, name: str) -> list[bytes]:
        """Forget the session. Returns the keys that no other session holds."""
        record = self._records.pop(name, None)
        return [] if record is None else self._let_go(record, set(record.every_key))

    def is_private(self, record: SessionKv, key: bytes) -> bool:
        """Whether no other session holds this page."""
        return self._holders.get(key, 0) <= (1 if key in record.every_key else 0)

    def held(self, key: bytes) -> bool:
        return key in self._holders

    def keys(self) -> set[bytes]:
        """Every key that a session has."""
        return set(self._holders)

    def _let_go(self, record: SessionKv, keys: Iterable[bytes]) -> list[bytes]:
        orphans = []
        for key in keys:
            record.every_key.discard(key)
            left = self._holders.get(key, 0) - 1
            if left > 0:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)
                orphans.append(key)
        return orphans
