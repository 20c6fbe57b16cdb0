"""Keys of pages: a chain of digests over exact tokens.

A key names the tokens of a page *and everything before them*, the model, the layout, the
shard and the tenant's salt. Every field is length-framed and every kind of digest has its own domain,
so no two different inputs share a byte string; nothing depends on the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import xxhash

from kvtier.errors import TierUsageError

PageKey: TypeAlias = bytes
KEY_BYTES = 32
SALT_ID_MAX_BYTES = 32
DIGEST_BYTES: Final = 16  # of a payload's
_LENGTH: Final = struct.Struct(">Q")


def framed_digest(domain: bytes, *fields: bytes | memoryview) -> bytes:
    """sha256 over the domain and the fields, each preceded by its length in 8 bytes."""
    digest = hashlib.sha256()
    for field in (domain, *fields):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()


def root_key(*, fingerprint: bytes, group: int, shard: int, shards: int, salt: bytes) -> PageKey:
    """The parent of a transcript's first page: who may share, and in which form.

    `fingerprint` stands for model, layout, dtype and backend mode; `salt` is the tenant's.
    """
    if not 0 <= shard < shards:
        raise TierUsageError(f"shard {shard} of {shards} does not exist; shards count from 0")
    if not 0 <= group < 2**32 or shards >= 2**32:
        raise TierUsageError(f"group {group} and shards {shards} must fit in 32 bits")
    return framed_digest(b"tenuto.page.root.v1", fingerprint, struct.pack(">III", group, shard, shards), salt)


def next_key(parent: PageKey, tokens: Sequence[int]) -> PageKey:
    """The key of the page that holds `tokens` (one page's worth, or fewer for a partial page)."""
    if len(parent) != KEY_BYTES:
        raise TierUsageError(f"a parent key has {KEY_BYTES} bytes, this one has {len(parent)}")
    if not tokens:
        raise TierUsageError("a page without tokens has no key; leave it out of the chain")
    try:
        packed = struct.pack(f">{len(tokens)}I", *tokens)
    except struct.error:
        raise TierUsageError("token ids must be integers from 0 to 2**32 - 1") from None
    return framed_digest(b"tenuto.page.v1", parent, packed)


def page_keys(root: PageKey, token_ids: Sequence[int], page_size: int) -> list[PageKey]:
    """Keys of the whole chain, in order; the last page may be partial."""
    if page_size < 1:
        raise TierUsageError(f"page_size is {page_size}; a page holds at least one token")
    keys: list[PageKey] = []
    parent = root
    for start in range(0, len(token_ids), page_size):
        parent = next_key(parent, token_ids[start : start + page_size])
        keys.append(parent)
    return keys


def layout_fingerprint(fingerprint: bytes, page_bytes: int, version: int) -> bytes:
    """What a file must carry to be read by us: model and layout, page size, format version."""
    return framed_digest(b"tenuto.layout.v1", fingerprint, struct.pack(">QI", page_bytes, version))


def page_digest(key: PageKey, salt_id: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    """Binds a payload to its key and tenant: a page copied to another page's place does not verify.

    XXH3 with 128 bits, over frames as in `framed_digest`: it ran ten times as fast as sha256 here. It finds damage
    and mix-ups, not forgers: who can write into a store could compute a sha256 over a forged page as well. Where that
    matters, pages are encrypted, which authenticates them (see `codec`).
    """
    view = memoryview(payload).cast("B")
    digest = begin_digest(key, salt_id, view.nbytes)
    digest.update(view)
    return digest.digest()


def begin_digest(key: PageKey, salt_id: bytes, payload_bytes: int) -> xxhash.xxh3_128:
    """A `page_digest` whose payload comes in pieces."""
    return xxhash.xxh3_128(_frames(b"tenuto.payload.v2", key, salt_id) + _LENGTH.pack(payload_bytes))


def _frames(*fields: bytes) -> bytes:
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)
