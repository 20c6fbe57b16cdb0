"""Memory for pools of pages on the host. No torch."""

from __future__ import annotations

import contextlib
import mmap

from engine.errors import RequestError


def pool_memory(size_bytes: int) -> mmap.mmap:
    """Zeros, aligned to a page of the system, so that a disk can write there by itself; in huge ones where
    there are, for attention jumps from place to place.

    Raises RequestError (bad_request) where the system has not so much.
    """
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RequestError(
            "bad_request", f"a pool of {size_bytes} bytes cannot be had: {error}; lower --kv-tokens"
        ) from error
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
