"""Who has logged in, as a signed cookie: which key, until when, and the mark that its forms must carry."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Final

NAME: Final = "tenuto_console"
LASTS_S: Final = 12 * 3600


@dataclass(frozen=True)
class Operator:
    """`mark`: what each form must send back, so that no other page can send it."""

    key_id: str
    until: int
    mark: str

    def marked(self, mark: str) -> bool:
        return hmac.compare_digest(mark.encode(), self.mark.encode())


class Signer:
    """`secret`: of the installation; the key that signs is derived from it and is nobody else's."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"tenuto console cookie", "sha256")

    def cookie(self, key_id: str) -> str:
        body = {"key": key_id, "until": int(time.time()) + LASTS_S, "mark": secrets.token_urlsafe(18)}
        text = base64.urlsafe_b64encode(json.dumps(body).encode()).decode()
        return f"{text}.{self._mac(text)}"

    def read(self, cookie: str | None) -> Operator | None:
        """None where it is not ours, or has run out."""
        text, _, mac = (cookie or "").partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return None
        body = json.loads(base64.urlsafe_b64decode(text))
        return Operator(body["key"], body["until"], body["mark"]) if body["until"] > time.time() else None

    def _mac(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
