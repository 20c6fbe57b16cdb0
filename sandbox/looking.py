"""What an agent says of its workspace: a root's hash, and the blobs of folders that are not known here yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import snapshots
from .blobs import BlobStore
from .client import Channel
from .errors import SandboxFailure
from .snapshots import Tree


class Look:
    """One scan of a workspace, which is frozen. `blobs`: folders by hash, as far as they were sent.

    `before` has, for a folder's hash, that of the folder which was at its path at the scan before. `others` are paths
    that no snapshot keeps: sockets, pipes, and what lies too deep.
    """

    def __init__(self, channel: Channel, header: dict[str, Any], body: bytes) -> None:
        self.channel = channel
        self.root: str = header["root"]
        self.others: list[str] = header["others"]
        self.left_out = tuple(f"{path}: {why}" for path, why in header["left_out"])
        self.stale = tuple(header["stale"])
        self.blobs: dict[str, bytes] = {}
        self.before: dict[str, str] = {}
        self._take(header, body)

    @classmethod
    async def of(cls, channel: Channel, verify: bool = False) -> Look:
        return cls(channel, *await channel.request("scan", verify=verify))

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        at = 0
        for digest, length, before in header["folders"]:
            self.blobs[digest] = body[at : at + length]
            self.before[digest] = before
            at += length

    async def fetch(self, digests: Iterable[str]) -> None:
        """Asks for folders that were not sent; what is below them comes along."""
        missing = [digest for digest in digests if digest not in self.blobs]
        while missing:
            known = len(self.blobs)
            self._take(*await self.channel.request("folders", digests=missing))
            missing = [digest for digest in missing if digest not in self.blobs]
            if len(self.blobs) == known:
                raise SandboxFailure(f"the agent does not send the folder {missing[0]} of its own scan")

    async def tree(self) -> Tree:
        """All that a snapshot keeps, as `snapshots.load` gives it."""
        top: Tree = []
        todo = [(self.root, top)]
        while todo:
            if todo[-1][0] not in self.blobs:
                await self.fetch([digest for digest, _ in todo])
            digest, tree = todo.pop()
            tree += snapshots.parse(digest, self.blobs[digest])
            for entry in tree:
                if entry[1] == "d":
                    below: Tree = []
                    todo.append((entry[3], below))
                    entry[3] = below
        return top


class New:
    """What a store lacks of a workspace. Call `find` until it needs no more folders; blocking."""

    def __init__(self, look: Look, store: BlobStore) -> None:
        self.look = look
        self.store = store
        self.trusted = store.whole
        self.files: dict[str, tuple[str, str, int]] = {}  # hash -> path, kind, size
        self._todo = [(look.root, "")]
        self._folders: list[str] = []  # parents first; one that is there twice is named twice

    def find(self) -> list[str]:
        """Goes on as far as the blobs reach; returns the hashes of folders that must be fetched for the rest."""
        todo, self._todo = self._todo, []
        while todo:
            digest, prefix = todo.pop()
            if self.trusted and self.store.has(digest):
                continue
            if digest not in self.look.blobs:
                self._todo.append((digest, prefix))
                continue
            self._folders.append(digest)
            known = self._known(self.look.before.get(digest, ""))
            for entry in snapshots.parse(digest, self.look.blobs[digest]):
                if entry[1] == "d":
                    todo.append((entry[3], f"{prefix}{entry[0]}/"))
                elif entry[1] in "fs" and entry[3] not in known and not self.store.has(entry[3]):
                    self.files[entry[3]] = (prefix + entry[0], entry[1], entry[4])
        return [digest for digest, _ in self._todo]

    def _known(self, before: str) -> set[str]:
        """What need not be looked for: the folder that was here before is in the store, and so are its files."""
        if not before or not self.trusted or not self.store.has(before):
            return set()
        return {entry[3] for entry in snapshots.parse(before, self.store.get(before)) if entry[1] in "fs"}

    def folders(self) -> list[bytes]:
        """The blobs of the folders, each after those below it."""
        return [self.look.blobs[digest] for digest in dict.fromkeys(reversed(self._folders))]
