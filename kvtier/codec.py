"""How payloads are stored below the host tier: compressed where that pays, encrypted where a key ring is given.

Order on the way down: byte planes, compression, encryption, digest. KV in bf16 hardly compresses as it is: its
mantissa bytes are noise, and they sit between its exponent bytes. Split into planes, the exponent bytes compress
alone. Whether that pays is measured for every segment: the first page is tried, and a segment that saves less
than the least share is stored as it came.

Real bf16 KV of two small models took 0.72 to 0.74 of its bytes by planes and zstd (0.80 without planes), and came
back at 0.7 to 0.8 GB/s on one core: less than a local disk reads. So compression buys room, and time only where a
tier is slower than that. Encryption ran at 4 to 5 GB/s.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

from kvtier.errors import NoKeyError, TierConfigError, UndecodableError
from kvtier.fileops import Buffer
from kvtier.keys import layout_fingerprint
from kvtier.segment import KEY_ID_MAX_BYTES, Form

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
SEAL_BYTES: Final = _NONCE_BYTES + _TAG_BYTES


class Compression(IntEnum):
    """As it stands in a segment's header. `ZSTD` needs the extra `tenuto-server[zstd]`."""

    OFF = 0
    ZLIB = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class DomainKey:
    """A key of a sharing domain: up to 16 bytes that name it in the header, and 16, 24 or 32 secret ones.

    Nonces are 96 random bits, so a key serves at most 2**32 pages.
    """

    key_id: bytes
    secret: bytes


class KeyRing(Protocol):
    """The caller's keys. Called from any thread, for every segment; answers at once."""

    def current(self, salt_id: bytes) -> DomainKey | None:
        """The key that this domain's pages are written with. None: nothing of this domain is stored."""
        ...

    def find(self, salt_id: bytes, key_id: bytes) -> DomainKey | None:
        """A key that this domain's pages were written with. None: those pages are misses from now on."""
        ...


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Both are off by default. `element_bytes` is the width of the numbers in a page (2 for bf16)."""

    compression: Compression = Compression.OFF
    least_saving: float = 0.1
    element_bytes: int = 2
    keys: KeyRing | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least_saving < 1:
            raise TierConfigError(f"least_saving is {self.least_saving}; it is a share, from 0 to below 1")
        if not 1 <= self.element_bytes <= 16:
            raise TierConfigError(f"element_bytes is {self.element_bytes}; use 1 to 16")


class Codec:
    """Between pages and stored bytes. Stateless but for its configuration, so any thread may use it."""

    def __init__(self, config: CodecConfig, page_bytes: int) -> None:
        self._config, self._page_bytes = config, page_bytes
        self._planes = config.element_bytes if page_bytes % config.element_bytes == 0 else 1
        if config.compression is Compression.ZSTD:
            _zstandard()
        if config.keys is not None:
            _aead(bytes(16))

    @property
    def most_stored_bytes(self) -> int:
        """What a page takes at most."""
        return self._page_bytes + (SEAL_BYTES if self._config.keys is not None else 0)

    def encode(self, pages: Sequence[tuple[bytes, Buffer]], salt_id: bytes) -> tuple[Form, list[Buffer]]:
        """The form that pays for these pages, and their stored bytes. NoKeyError where none may be stored."""
        compression, payloads = self._compressed([memoryview(payload).cast("B") for _, payload in pages])
        planes = self._planes if compression else 1
        if self._config.keys is None:
            return Form(compression, planes), payloads
        key = self._config.keys.current(salt_id)
        if key is None:
            raise NoKeyError("the key ring has no key for this sharing domain")
        if not 1 <= len(key.key_id) <= KEY_ID_MAX_BYTES:
            raise TierConfigError(f"a key id has 1 to {KEY_ID_MAX_BYTES} bytes, this one has {len(key.key_id)}")
        form = Form(compression, planes, key.key_id)
        aead = _aead(key.secret)
        sealed: list[Buffer] = []
        for (page_key, _), payload in zip(pages, payloads, strict=True):
            nonce = os.urandom(_NONCE_BYTES)
            sealed.append(nonce + aead.encrypt(nonce, payload, _context(form, page_key, salt_id)))
        return form, sealed

    def _compressed(self, payloads: list[Buffer]) -> tuple[Compression, list[Buffer]]:
        kind = self._config.compression
        if kind is Compression.OFF or not payloads or not self._pays(self._compress(payloads[:1]), 1):
            return Compression.OFF, payloads
        packed = self._compress(payloads)
        return (kind, packed) if self._pays(packed, len(payloads)) else (Compression.OFF, payloads)

    def _compress(self, payloads: list[Buffer]) -> list[Buffer]:
        pack = _PACK[self._config.compression]
        return [pack(split_planes(payload, self._planes)) for payload in payloads]

    def _pays(self, packed: list[Buffer], pages: int) -> bool:
        # A page that grew would not fit where one page was reserved, whatever the others save.
        if max(len(one) for one in packed) > self._page_bytes:
            return False
        return sum(len(one) for one in packed) <= (1 - self._config.least_saving) * pages * self._page_bytes

    @staticmethod
    def is_plain(form: Form) -> bool:
        """Whether what is stored is the page itself."""
        return not form.compression and not form.key_id

    def readable(self, form: Form, salt_id: bytes) -> bool:
        """Whether this process has what it takes to decode such a segment."""
        if form.compression not in _UNPACK or form.planes < 1:
            return False
        return not form.key_id or self._find(form, salt_id) is not None

    def _find(self, form: Form, salt_id: bytes) -> DomainKey | None:
        return None if self._config.keys is None else self._config.keys.find(salt_id, form.key_id)

    def decode(self, form: Form, key: bytes, salt_id: bytes, stored: Buffer) -> Buffer:
        """The page, `page_bytes` long, or UndecodableError."""
        if not self.readable(form, salt_id):
            raise UndecodableError("no key, or no library, for this segment")
        payload = stored
        if form.key_id:
            payload = self._unseal(form, key, salt_id, stored)
        if form.compression:
            try:
                payload = _UNPACK[form.compression](payload, self._page_bytes)
            except (ValueError, zlib.error) as error:
                raise UndecodableError(f"the payload cannot be decompressed: {error}") from error
            payload = join_planes(payload, form.planes)
        if len(payload) != self._page_bytes:
            raise UndecodableError(f"a page has {self._page_bytes} bytes, this one has {len(payload)}")
        return payload

    def _unseal(self, form: Form, key: bytes, salt_id: bytes, stored: Buffer) -> bytes:
        from cryptography.exceptions import InvalidTag

        found = self._find(form, salt_id)
        if found is None or len(stored) < SEAL_BYTES:
            raise UndecodableError("no key for this segment")
        view = memoryview(stored)
        try:
            aead = _aead(found.secret)
            return bytes(aead.decrypt(view[:_NONCE_BYTES], view[_NONCE_BYTES:], _context(form, key, salt_id)))
        except InvalidTag as error:
            raise UndecodableError("another key than the one that this payload was encrypted with") from error


@dataclass(frozen=True, slots=True)
class PageForm:
    """What pages a store holds, and how it keeps them."""

    page_bytes: int
    fingerprint: bytes
    codec: Codec

    def layout(self, version: int) -> bytes:
        return layout_fingerprint(self.fingerprint, self.page_bytes, version)


def _context(form: Form, key: bytes, salt_id: bytes) -> bytes:
    """What a ciphertext is bound to: its page, its tenant, and how it is to be read."""
    return struct.pack(">BBB", form.compression, form.planes, len(salt_id)) + salt_id + key


def split_planes(page: Buffer, planes: int) -> Buffer:
    """Byte 0 of every element, then byte 1 of every element, and so on."""
    if planes == 1:
        return page
    flat = bytes(page)
    return b"".join(flat[plane::planes] for plane in range(planes))


def join_planes(packed: Buffer, planes: int) -> Buffer:
    """The inverse of `split_planes`."""
    if planes == 1:
        return packed
    if len(packed) % planes:
        raise UndecodableError(f"{len(packed)} bytes are not elements of {planes}")
    page, length = bytearray(len(packed)), len(packed) // planes
    for plane in range(planes):
        page[plane::planes] = packed[plane * length : (plane + 1) * length]
    return page


# --- libraries -------------------------------------------------------------------------------------------


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise TierConfigError("compression by zstd needs `pip install tenuto-server[zstd]`") from error
    return zstandard


def _aead(secret: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise TierConfigError("encrypted tiers need the package `cryptography`") from error
    try:
        return AESGCM(secret)
    except ValueError as error:
        raise TierConfigError("a secret has 16, 24 or 32 bytes") from error


def _unzlib(packed: Buffer, most: int) -> bytes:
    """At most one page, whatever the input claims."""
    engine = zlib.decompressobj()
    page = engine.decompress(packed, most + 1)
    if not engine.eof:
        raise ValueError("not one page")
    return page


def _unzstd(packed: Buffer, most: int) -> bytes:
    module = _zstandard()
    try:
        parameters = module.get_frame_parameters(packed)
        if parameters.content_size != most:
            raise ValueError("not one page")
        return bytes(module.ZstdDecompressor().decompress(packed, max_output_size=most))
    except module.ZstdError as error:
        raise ValueError(str(error)) from error


_PACK: Final[dict[Compression, Callable[[Buffer], bytes]]] = {
    Compression.ZLIB: lambda page: zlib.compress(page, 1),
    Compression.ZSTD: lambda page: bytes(_zstandard().ZstdCompressor(level=1).compress(page)),
}
_UNPACK: Final[dict[int, Callable[[Buffer, int], Buffer]]] = {
    Compression.OFF: lambda stored, most: stored,
    Compression.ZLIB: _unzlib,
    Compression.ZSTD: _unzstd,
}
