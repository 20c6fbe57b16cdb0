"""The console's own small application: who may see it, what is sent with every page, and what is done with a form."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from runtime.api.request_id import request_id
from runtime.console import views_fleet, views_people, views_session
from runtime.console.actions import ACTIONS, Action, whole
from runtime.console.cookies import LASTS_S, NAME, Operator, Signer
from runtime.console.inside import Inside, Refused
from runtime.console.show import BASE, Page, environment, now
from runtime.console.visit import Visit
from runtime.console.ways import FLASH, HEADERS, back_to, flash, form, ours, read_flash
from runtime.errors import RequestError, Unavailable
from runtime.settings import Settings
from runtime.store import audit, keys
from runtime.store.audit import Act

log = logging.getLogger(__name__)

HERE: Final = Path(__file__).parent

View = Callable[[Visit], Awaitable[Page]]


PAGES: Final[Mapping[str, View]] = {
    "/": views_fleet.fleet,
    "/sessions": views_fleet.sessions,
    "/sessions/{tenant}/{session}": views_session.session,
    "/sessions/{tenant}/{session}/files": views_session.files,
    "/approvals": views_fleet.approvals,
    "/kv": views_fleet.kv,
    "/sandboxes": views_fleet.sandboxes,
    "/nodes": views_fleet.nodes,
    "/tenants": views_people.tenants,
    "/tenants/{tenant}": views_people.tenant,
    "/usage": views_people.usage,
    "/audit": views_people.audit,
    "/runbooks": views_people.runbooks,
    "/runbooks/{name}": views_people.runbook,
}


def install(app: FastAPI, settings: Settings) -> None:
    """Mount it at /console."""
    app.mount(BASE, Console(app, lambda: Signer(settings.secrets_key_bytes)))


class Console:
    """ASGI application."""

    def __init__(self, app: FastAPI, make_signer: Callable[[], Signer]) -> None:
        self._outer, self._make_signer = app, make_signer
        self._templates = environment()
        self._known: dict[str, Any] | None = None  # what was last told of the fleet, for when nobody answers
        routes = [Route(path, self._page(view), methods=["GET"]) for path, view in PAGES.items()]
        self._inner = Starlette(
            routes=[
                Mount("/static", _Static(directory=HERE / "static")),
                Route("/login", self._login, methods=["GET", "POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/act/{action}", self._confirm, methods=["GET"]),
                Route("/act/{action}", self._act, methods=["POST"]),
                Route("/stream/{tenant}/{session}", self._stream, methods=["GET"]),
                Route("/file/{tenant}/{session}/{path:path}", self._file, methods=["GET"]),
                *routes,
            ],
            exception_handlers={404: self._nowhere, 500: self._broken},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._inner(scope, receive, send)

    @cached_property
    def _signer(self) -> Signer:
        """The key is read when somebody comes: who only describes the application has none."""
        return self._make_signer()

    def _page(self, view: View) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            operator = self._operator(request)
            if operator is None:
                return self._to_login(request)
            try:
                page = await view(Visit(request, Inside(self._outer, operator.key_id)))
            except Refused as refused:
                return await self._refused(request, operator, refused)
            if "overview" in page.facts:
                self._known = {**page.facts["overview"], "at": now()}
            return self._render(request, operator, page)

        return answer

    def _operator(self, request: Request) -> Operator | None:
        return self._signer.read(request.cookies.get(NAME))

    def _render(self, request: Request, operator: Operator | None, page: Page) -> Response:
        told = read_flash(request)
        context = {
            "request": request,
            "operator": operator,
            "mark": operator.mark if operator else "",
            "actions": ACTIONS,
            "flash": told,
            "here": request.url.path,
            "once": secrets.token_urlsafe(12),
            **page.facts,
        }
        text = self._templates.get_template(page.template).render(context)
        response = HTMLResponse(text, page.status, headers=HEADERS)
        if told is not None:
            response.delete_cookie(FLASH, path=BASE)
        return response

    async def _refused(self, request: Request, operator: Operator, refused: Refused) -> Response:
        """401: the key that somebody came with works no more. 503: what is known without the part that is away."""
        if refused.status == 401:
            return self._to_login(request, "Your key works no more. Log in with another one.")
        if refused.status != 503:
            return self._render(request, operator, Page("refused.html", {"refused": refused}, refused.status))
        checks = await Inside(self._outer, operator.key_id).ready()
        facts = {"refused": refused, "checks": checks, "known": self._known}
        return self._render(request, operator, Page("away.html", facts, refused.status))

    def _to_login(self, request: Request, why: str = "") -> Response:
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        response: Response = RedirectResponse(f"{BASE}/login?next={quote(back, safe='')}", 303, headers=HEADERS)
        if why:
            flash(response, why, bad=True)
        if NAME in request.cookies:
            response.delete_cookie(NAME, path=BASE)
        return response

    async def _nowhere(self, request: Request, _: Exception) -> Response:
        operator = self._operator(request)
        if operator is None:
            return self._to_login(request)
        return await self._refused(
            request, operator, Refused(404, "not_found", f"there is nothing at {request.url.path}")
        )

    async def _broken(self, request: Request, _: Exception) -> Response:
        """A fault of the console's own; the log has it."""
        page = Page("refused.html", {"refused": Refused(500, "internal", "the console failed; its log says how")}, 500)
        return self._render(request, self._operator(request), page)

    async def _login(self, request: Request) -> Response:
        back = ours(request.query_params.get("next"))
        if request.method == "GET":
            return self._render(request, None, Page("login.html", {"next": back}))
        fields = await form(request)
        back = ours(fields.get("next"))
        db = self._outer.state.db
        try:
            caller = await keys.caller(db, fields.get("key", "").strip() or "none")
            if caller.scope != "admin":
                wrong = "This key may use sessions. The console takes a key of scope admin."
                return self._render(request, None, Page("login.html", {"next": back, "wrong": wrong}, 403))
            await audit.note(db, Act(caller.tenant_id, caller.key_id, "console.login", request_id()), None)
        except (RequestError, Unavailable) as error:
            status = error.status if isinstance(error, RequestError) else 503
            return self._render(request, None, Page("login.html", {"next": back, "wrong": f"{error}."}, status))
        response = RedirectResponse(back, 303, headers=HEADERS)
        secure = request.url.scheme == "https"
        cookie = self._signer.cookie(caller.key_id)
        # lax: a link in an alert leads to its page; what changes something is a POST, and carries the mark
        response.set_cookie(NAME, cookie, max_age=LASTS_S, path=BASE, httponly=True, samesite="lax", secure=secure)
        return response

    async def _logout(self, request: Request) -> Response:
        operator = self._operator(request)
        fields = await form(request)
        if operator is None or not operator.marked(fields.get("mark", "")):
            return self._to_login(request)
        response = RedirectResponse(f"{BASE}/login", 303, headers=HEADERS)
        response.delete_cookie(NAME, path=BASE)
        return response

    async def _confirm(self, request: Request) -> Response:
        """What will be lost, before it is; works without JavaScript."""
        operator = self._operator(request)
        if operator is None:
            return self._to_login(request)
        action = ACTIONS.get(str(request.path_params["action"]))
        if action is None:
            return await self._refused(request, operator, Refused(404, "not_found", "there is no such action"))
        fields = {name: text for name, text in request.query_params.items() if name not in ("mark", "once", "back")}
        facts = {
            "action": action,
            "name": request.path_params["action"],
            "fields": fields,
            "back": ours(request.query_params.get("back")),
            "from_here": request.headers.get("sec-fetch-site", "same-origin") == "same-origin",
        }
        return self._render(request, operator, Page("confirm.html", facts))

    async def _act(self, request: Request) -> Response:
        operator = self._operator(request)
        fields = await form(request)
        back = ours(fields.pop("back", ""))
        if operator is None:
            return self._to_login(request)
        if not operator.marked(fields.pop("mark", "")):
            refused = Refused(403, "forbidden", "this form is not from this login; reload the page and try again")
            return await self._refused(request, operator, refused)
        name = str(request.path_params["action"])
        action = ACTIONS.get(name)
        if action is None:
            return await self._refused(request, operator, Refused(404, "not_found", "there is no such action"))
        once = fields.pop("once", "") or secrets.token_urlsafe(12)
        try:
            path, body = _request(name, action, fields)
            told = await Inside(self._outer, operator.key_id).act(action.method, path, body, once)
        except (ValueError, KeyError) as error:
            wrong = f"a field is missing: {error}" if isinstance(error, KeyError) else str(error)
            return back_to(back, f"{action.title}: {wrong}", bad=True)
        except Refused as refused:
            return back_to(back, f"{action.title}: {refused.message}", bad=True)
        return self._done(request, operator, name, action, fields, told, back)

    def _done(
        self,
        request: Request,
        operator: Operator,
        name: str,
        action: Action,
        fields: Mapping[str, str],
        told: Any,
        back: str,
    ) -> Response:
        """Where the answer is worth a page of its own, that; else back to where the form was."""
        if name == "session.fork":
            return back_to(f"{BASE}/sessions/{quote(fields['tenant'])}/{quote(told['id'])}", action.done)
        if name in ("key.create", "key.rotate", "kv.audit", "kv.repair", "reconcile", "session.exec"):
            facts = {"action": action, "name": name, "told": told, "back": back}
            return self._render(request, operator, Page("done.html", facts))
        receipt = isinstance(told, dict) and told.get("object") == "kv.receipt"
        said = ": ".join(filter(None, (told["status"], told["detail"]))) if receipt else ""
        return back_to(back, f"{action.done} ({said})" if said else action.done)

    async def _stream(self, request: Request) -> Response:
        return await self._forward(request, "sessions/{session}/events/stream")

    async def _file(self, request: Request) -> Response:
        return await self._forward(request, "sessions/{session}/sandbox/files/{path}")

    async def _forward(self, request: Request, path: str) -> Response:
        operator = self._operator(request)
        if operator is None:
            return Response("log in first", 401, headers=HEADERS)
        tenant = request.path_params["tenant"]
        whole = f"/v1/admin/tenants/{tenant}/" + path.format(**request.path_params)
        return _Forwarded(Inside(self._outer, operator.key_id), whole)


class _Forwarded(Response):
    def __init__(self, api: Inside, path: str) -> None:
        super().__init__()
        self._api, self._path = api, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.forward(scope, receive, send, self._path)


class _Static(StaticFiles):
    """Assets are asked for with their digest in the address, so they never change there."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def _request(name: str, action: Action, fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Raises ValueError, KeyError."""
    path, body = action.request(fields)
    if name == "sessions.cancel":
        try:
            wanted = json.loads(fields["filter"])
        except (ValueError, RecursionError):
            raise ValueError("its filter is no JSON") from None
        return path, {"filter": wanted, "expect": whole(fields["expect"])}
    return path, body
