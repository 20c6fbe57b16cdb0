"""Blobs in a bucket of an S3-compatible store, through boto3. Imported only where one is configured."""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvtier.config import S3Place
from kvtier.errors import TierConfigError
from kvtier.fileops import Buffer

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as missing:
    raise TierConfigError("a bucket as shared store needs `pip install tenuto-server[s3]`") from missing

_CONNECTIONS = 64
_LISTED_AT_ONCE = 1000
_EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_ABSENT = {"NoSuchKey", "404"}


class S3Objects:
    """See `objects.Objects`. Create-only rests on conditional writes, which the store must honour."""

    def __init__(self, place: S3Place) -> None:
        self._bucket, self._prefix = place.bucket, place.prefix
        self._lock = threading.Lock()
        self._conditional: bool | None = None  # until the first write has found out
        config = Config(
            connect_timeout=place.timeout_s,
            read_timeout=place.timeout_s,
            # A slow or absent store is a miss: the caller decides whether to ask again.
            retries={"mode": "standard", "total_max_attempts": 2},
            max_pool_connections=_CONNECTIONS,
            signature_version="s3v4",
        )
        try:
            self._client: Any = boto3.client(
                "s3", endpoint_url=place.endpoint_url, region_name=place.region, config=config
            )
        except (BotoCoreError, ValueError) as error:
            raise TierConfigError(f"the bucket {place.bucket} cannot be used: {error}") from error

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._check_conditional()
        return self._create(name, b"".join(parts))

    def _check_conditional(self) -> None:
        """Once: a store that ignored the condition would let one writer overwrite another. OSError then."""
        with self._lock:
            if self._conditional is None:
                probe = f"probe/{secrets.token_hex(16)}"
                self._create(probe, b"first")
                self._conditional = not self._create(probe, b"second")
                self.remove(probe)
            if not self._conditional:
                raise OSError(errno.ENOTSUP, "the store overwrites where it was asked to create only (If-None-Match)")

    def _create(self, name: str, body: bytes) -> bool:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body, IfNoneMatch="*")
        except ClientError as error:
            if _code(error) in _EXISTS:
                return False
            raise _as_os_error(error) from error
        except BotoCoreError as error:
            raise _as_os_error(error) from error
        return True

    def read(self, name: str) -> Buffer | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            with answer["Body"] as body:
                return bytes(body.read())
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise _as_os_error(error) from error
        except BotoCoreError as error:  # also a connection that breaks half way through a body
            raise _as_os_error(error) from error

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            PaginationConfig={"PageSize": _LISTED_AT_ONCE},
        )
        try:
            for page in pages:
                for found in page.get("Contents", ()):
                    yield found["Key"].removeprefix(self._prefix), int(found["Size"])
        except (ClientError, BotoCoreError) as error:
            raise _as_os_error(error) from error

    def remove(self, name: str) -> None:
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
        except (ClientError, BotoCoreError) as error:
            raise _as_os_error(error) from error

    def close(self) -> None:
        self._client.close()


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _as_os_error(error: Exception) -> OSError:
    return OSError(errno.EIO, str(error))
