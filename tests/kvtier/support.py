"""Small pages, a stack over a temporary directory, and a file system that fails on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvtier import CodecConfig, Io, Loaded, RealIo, SharedConfig, TierConfig, TierStack, Wanted, root_key
from kvtier.fileops import Buffer, Room
from kvtier.keys import page_keys
from kvtier.segments import footprint
from kvtier.slots import FILE_HEADER_BYTES, stride_of

PAGE = 1000
SALT_ID = b"tenant-a"
FINGERPRINT = b"model-1"


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def smooth_of(number: int, size: int = PAGE) -> bytes:
    """Little-endian 16-bit numbers with a noisy low byte and a calm high one, as bf16 KV has them."""
    noise = hashlib.shake_128(f"smooth {number}".encode()).digest(size // 2)
    page = bytearray(size)
    page[0::2], page[1::2] = noise, bytes([number % 251]) * (size // 2)
    return bytes(page)


def payload_of(number: int, size: int = PAGE) -> bytes:
    return hashlib.shake_128(f"payload {number}".encode()).digest(size)


def pages_of(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(key_of(number), payload_of(number)) for number in numbers]


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def numbers_in(keys: set[bytes], upto: int = 200) -> set[int]:
    return {number for number in range(upto) if key_of(number) in keys}


def payloads(loaded: Sequence[Loaded | None]) -> list[bytes | None]:
    return [None if one is None else bytes(one.payload) for one in loaded]


def rooms_of(*numbers: int, size: int = PAGE) -> list[Wanted]:
    """Memory for pages, with something else in it."""
    return [(key_of(number), memoryview(bytearray(b"\xaa" * size))) for number in numbers]


def landed(rooms: Sequence[Wanted], keys: Collection[bytes]) -> list[bytes | None]:
    """What lies in the rooms of these keys, and None for the others."""
    return [bytes(room) if key in keys else None for key, room in rooms]


def host_budget(pages: int) -> int:
    return FILE_HEADER_BYTES + pages * stride_of(PAGE)


def nvme_budget(segments: int, pages_each: int = 1) -> int:
    return segments * footprint(pages_each, PAGE)


def config(
    base: Path,
    *,
    host: int = 16,
    nvme_bytes: int = 2**20,
    fingerprint: bytes = FINGERPRINT,
    page_bytes: int = PAGE,
    shared_bytes: int = 0,
    codec: CodecConfig | None = None,
) -> TierConfig:
    return TierConfig(
        page_bytes=page_bytes,
        fingerprint=fingerprint,
        host_path=base / "arena" if host else None,
        host_bytes=host_budget(host),
        nvme_dir=base / "nvme" if nvme_bytes else None,
        nvme_bytes=nvme_bytes,
        io_threads=2,
        read_threads=2,
        shared=SharedConfig(base / "shared", shared_bytes, grace_s=0) if shared_bytes else None,
        codec=codec or CodecConfig(),
    )


def chain(salt: bytes, tokens: Sequence[int], page_size: int = 4, fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    root = root_key(fingerprint=fingerprint, group=0, shard=0, shards=1, salt=salt)
    return page_keys(root, tokens, page_size)


def segments(base: Path) -> list[Path]:
    return sorted((base / "nvme").glob("??/*.seg"))


def manifests(base: Path) -> list[Path]:
    return sorted((base / "nvme").glob("??/*.json"))


def quarantined(base: Path) -> list[Path]:
    return sorted((base / "nvme" / "quarantine").iterdir())


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def flip_in_payload(path: Path, number: int) -> None:
    """One bit in the middle of a page, wherever the file has it."""
    flip_bit(path, path.read_bytes().index(payload_of(number)) + PAGE // 2)


class NoSync(RealIo):
    """The operating system, for tests in which nothing loses power: thousands of syncs take minutes."""

    def fsync(self, fd: int) -> None:
        pass


class FaultyIo(RealIo):
    """The operating system, but `rule(operation, path)` may raise in its place."""

    def __init__(self) -> None:
        self.rule: Callable[[str, Path], None] = lambda operation, path: None
        self.paths: dict[int, Path] = {}

    def fail(self, error: OSError, when: Callable[[str, Path], bool]) -> None:
        def rule(operation: str, path: Path) -> None:
            if when(operation, path):
                raise error

        self.rule = rule

    def heal(self) -> None:
        self.rule = lambda operation, path: None

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.rule("open", path)
        fd = super().open(path, flags, mode)
        self.paths[fd] = path
        return fd

    def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
        self.rule("read", self.paths[fd])
        return super().read_at(fd, buffers, offset)

    def write_at(self, fd: int, buffers: list[Buffer], offset: int) -> None:
        try:
            self.rule("write", self.paths[fd])
        except OSError:  # half of it arrives, as on a real disk that fills up
            whole = b"".join(bytes(buffer) for buffer in buffers)
            super().write_at(fd, [whole[: len(whole) // 2]], offset)
            raise
        super().write_at(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self.rule("fsync", self.paths[fd])
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self.rule("rename", target)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.rule("link", target)
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.rule("unlink", path)
        super().unlink(path)

    def truncate(self, fd: int, size: int) -> None:
        self.rule("truncate", self.paths[fd])
        super().truncate(fd, size)


def open_stack(
    base: Path, io: Io | None = None, *, host: int = 16, nvme_bytes: int = 2**20, shared_bytes: int = 0
) -> TierStack:
    return TierStack.open(config(base, host=host, nvme_bytes=nvme_bytes, shared_bytes=shared_bytes), io=io)
