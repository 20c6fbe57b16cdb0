"""What Postgres keeps only sealed: AES-256-GCM (NIST SP 800-38D) under the installation's own key.

A sealed text is `v1:KEY:DATA`: which key it was, and in base64 a random nonce of 12 bytes with the ciphertext. Tenant
and name are associated data: what was sealed for one opens as no other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os

from runtime.errors import TenutoError

KEY_BYTES = 32
NONCE_BYTES = 12
LITERAL = "tool value"  # the name of values that stand in a tool's declaration itself


class SealError(TenutoError):
    """A value cannot be sealed or opened; the message says why, and never what."""


def parse_key(text: str) -> bytes:
    """Raises ValueError unless the text is 32 bytes in base64."""
    try:
        key = base64.b64decode(text.strip(), altchars=b"-_" if set(text) & set("-_") else None, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"give {KEY_BYTES} random bytes in base64, as `openssl rand -base64 {KEY_BYTES}` prints them")
    return key


class Sealer:
    """Seals and opens under one key. Without a key it can do neither."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key
        self.key_id = hashlib.sha256(b"tenuto secrets " + key).hexdigest()[:12] if key else "none"

    def seal(self, tenant_id: str, name: str, text: str) -> str:
        """Raises SealError without a key."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if self._key is None:
            raise SealError("this process has no key for secrets; set TENUTO_SECRETS_KEY")
        nonce = os.urandom(NONCE_BYTES)
        data = nonce + AESGCM(self._key).encrypt(
            nonce, text.encode("utf-8", "surrogateescape"), _about(tenant_id, name)
        )
        return f"v1:{self.key_id}:{base64.b64encode(data).decode()}"

    def mac(self, tenant_id: str, text: str) -> bytes:
        """A digest that tells equal texts of a tenant, and nothing to whoever has not the key. Raises SealError."""
        if self._key is None:
            raise SealError("this process has no key for secrets; set TENUTO_SECRETS_KEY")
        return hmac.digest(self._key, _about(tenant_id, text), "sha256")

    def open(self, tenant_id: str, name: str, sealed: str) -> str:
        """Raises SealError: another key sealed it, or it is not what was sealed under this name."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        version, _, rest = sealed.partition(":")
        key_id, _, text = rest.partition(":")
        if version != "v1" or self._key is None or key_id != self.key_id:
            raise SealError(
                f"{name}: sealed with the key {key_id or '?'}, and this process has {self.key_id};"
                " give TENUTO_SECRETS_KEY the key of then, or set the secret again"
            )
        try:
            data = base64.b64decode(text, validate=True)
            plain = AESGCM(self._key).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], _about(tenant_id, name))
        except (InvalidTag, ValueError):
            raise SealError(f"{name}: what is kept of it was altered; set the secret again") from None
        return plain.decode("utf-8", "surrogateescape")


def _about(tenant_id: str, name: str) -> bytes:
    return f"{tenant_id}\0{name}".encode()
