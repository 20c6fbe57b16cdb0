"""What comes with a request and goes with an answer: forms, the way back, and what the next page says once."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from runtime.console.show import BASE

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
    " 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
MOST_FORM: Final = 64  # fields
MOST_SAID: Final = 300  # characters; a cookie holds 4096 bytes, and one may become nine
FLASH: Final = "tenuto_flash"


async def form(request: Request) -> dict[str, str]:
    """Its fields; none where it is no form."""
    try:
        return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FORM))
    except ValueError:
        return {}


def ours(address: str | None) -> str:
    """A page of the console; where an address leads elsewhere, the first one."""
    try:
        split = urlsplit(address or "")
    except ValueError:
        return f"{BASE}/"
    inside = split.path == BASE or split.path.startswith(f"{BASE}/")
    return str(address) if inside and not split.scheme and not split.netloc else f"{BASE}/"


def back_to(address: str, said: str, *, bad: bool = False) -> Response:
    response = RedirectResponse(address, 303, headers=HEADERS)
    flash(response, said, bad=bad)
    return response


def flash(response: Response, said: str, *, bad: bool) -> None:
    text = quote(json.dumps({"said": said[:MOST_SAID], "bad": bad}, ensure_ascii=False))
    response.set_cookie(FLASH, text, max_age=30, path=BASE, httponly=True, samesite="strict")


def read_flash(request: Request) -> dict[str, Any] | None:
    try:
        found = json.loads(unquote(request.cookies.get(FLASH, "")))
        return {"said": str(found["said"]), "bad": bool(found["bad"])}
    except (ValueError, KeyError, TypeError):
        return None
