"""A session's workspace, as both clients offer it."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from tenuto import _wire
from tenuto.models import File

if TYPE_CHECKING:
    from tenuto._async import AsyncClient
    from tenuto._sync import Client


def _query(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value not in (None, "", False)}


class Files:
    """Files of a session's workspace: now, or at the checkpoint of any step."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = f"{path}/sandbox"

    def list(self, path: str = "", *, step: int | None = None, recursive: bool = True) -> Iterator[File]:
        """The files of a folder in the order of their paths, with all below it unless `recursive` says otherwise."""
        asked = _query(path=path, step=step, recursive=recursive)
        while True:
            page = self._client.get(f"{self._path}/files", asked)
            yield from (File.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return
            asked["after"] = page["last_id"]

    def read(self, path: str, *, step: int | None = None) -> bytes:
        """A file's bytes. Raises APIError (404) where there is none."""
        return self._client.read(f"{self._path}/files/{_wire.quoted(path)}", _query(step=step))

    def write(
        self, path: str, data: bytes | str, *, mode: str = "0644", idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Put a file into the workspace. Raises APIError (409) while the session works."""
        body = data.encode() if isinstance(data, str) else data
        return self._client.put(f"{self._path}/files/{_wire.quoted(path)}", body, {"mode": mode}, key=idempotency_key)

    def delete(self, path: str, *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Remove a file, a link, or a folder with all that is in it."""
        return self._client.delete(f"{self._path}/files/{_wire.quoted(path)}", key=idempotency_key)

    def unpack(self, archive: bytes, *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Put all files of a tar archive into the workspace, over what is there."""
        return self._client.post_bytes(f"{self._path}/archive", archive, key=idempotency_key)

    def diff(self, before: int, to: int | None = None) -> builtins.list[dict[str, Any]]:
        """What was added, removed and changed between the checkpoints of two steps, or since one."""
        found: builtins.list[dict[str, Any]] = []
        asked = _query(**{"from": before, "to": to})
        while True:
            page = self._client.get(f"{self._path}/diff", asked)
            found += page["data"]
            if not page["has_more"]:
                return found
            asked["after"] = page["last_id"]


class AsyncFiles:
    """Files of a session's workspace: now, or at the checkpoint of any step."""

    def __init__(self, client: AsyncClient, path: str) -> None:
        self._client = client
        self._path = f"{path}/sandbox"

    async def list(self, path: str = "", *, step: int | None = None, recursive: bool = True) -> AsyncIterator[File]:
        """The files of a folder in the order of their paths, with all below it unless `recursive` says otherwise."""
        asked = _query(path=path, step=step, recursive=recursive)
        while True:
            page = await self._client.get(f"{self._path}/files", asked)
            for row in page["data"]:
                yield File.model_validate(row)
            if not page["has_more"]:
                return
            asked["after"] = page["last_id"]

    async def read(self, path: str, *, step: int | None = None) -> bytes:
        """A file's bytes. Raises APIError (404) where there is none."""
        return await self._client.read(f"{self._path}/files/{_wire.quoted(path)}", _query(step=step))

    async def write(
        self, path: str, data: bytes | str, *, mode: str = "0644", idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Put a file into the workspace. Raises APIError (409) while the session works."""
        body = data.encode() if isinstance(data, str) else data
        return await self._client.put(
            f"{self._path}/files/{_wire.quoted(path)}", body, {"mode": mode}, key=idempotency_key
        )

    async def delete(self, path: str, *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Remove a file, a link, or a folder with all that is in it."""
        return await self._client.delete(f"{self._path}/files/{_wire.quoted(path)}", key=idempotency_key)

    async def unpack(self, archive: bytes, *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Put all files of a tar archive into the workspace, over what is there."""
        return await self._client.post_bytes(f"{self._path}/archive", archive, key=idempotency_key)

    async def diff(self, before: int, to: int | None = None) -> list[dict[str, Any]]:  # type: ignore[valid-type]
        """What was added, removed and changed between the checkpoints of two steps, or since one."""
        found = []
        asked = _query(**{"from": before, "to": to})
        while True:
            page = await self._client.get(f"{self._path}/diff", asked)
            found += page["data"]
            if not page["has_more"]:
                return found
            asked["after"] = page["last_id"]
