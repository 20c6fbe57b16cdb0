"""What sync and async share: where the server is, how requests are formed, retried and read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from tenuto._tool import Given, declared
from tenuto.errors import APIError, ConnectionFailed, TenutoError
from tenuto.models import Event

DEFAULT_URL = "http://127.0.0.1:8300"
ATTEMPTS = 8
RETRIED_STATUS = frozenset({429, 502, 503, 504})
STREAM_TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # the server says something every few seconds
STREAM_ATTEMPTS = 60
LONG_TIMEOUT = httpx.Timeout(660.0, connect=5.0)  # of what a server answers once it has read and verified all of it
PIECE = 1 << 20
MOST_PATIENCE_S = 60.0  # of what a server asks for
LOOK_EVERY_S = 0.5
BYTES = {"Content-Type": "application/octet-stream"}
STREAM_ENDS = frozenset({"session.cancelled", "session.completed"})
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Server:
    """Where the server is, and the key that it wants."""

    url: str
    key: str

    @classmethod
    def find(cls, url: str | None, key: str | None) -> Server:
        """Arguments first, then TENUTO_API_URL and TENUTO_API_KEY, then the files of a local installation."""
        local_url, local_key = _local_installation()
        key = (key or os.environ.get("TENUTO_API_KEY") or local_key or "").strip()
        url = url or os.environ.get("TENUTO_API_URL") or local_url or DEFAULT_URL
        if not key:
            raise TenutoError(
                "there is no API key: pass api_key=, or set TENUTO_API_KEY; `tenuto up` writes the first one to"
                " admin.key in its home"
            )
        if not (key.isascii() and key.isprintable()):
            raise TenutoError("the API key has characters that no key has; give it as it was shown: tk_...")
        if not url.startswith(("http://", "https://")):
            raise TenutoError(f"{url!r} is no address of a server; it must start with http:// or https://")
        return cls(url.rstrip("/"), key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "User-Agent": "tenuto-python/0.1.0"}

    def away(self, error: Exception | None = None) -> ConnectionFailed:
        """What is raised when it was asked often enough."""
        said = str(error or "") or (type(error).__name__ if error else "it hangs up")
        return ConnectionFailed(f"{self.url} does not answer ({said}); is `tenuto up` running?")


def _local_installation() -> tuple[str | None, str | None]:
    """Address and first key of the `tenuto up` that runs here, else the key of one that has run.

    The port is not always the usual one: where that was taken, `up` chose another and wrote it down.
    """
    given = os.environ.get("TENUTO_HOME")
    homes = [Path(given)] if given else [Path("/var/lib/tenuto"), Path.home() / ".local/share/tenuto"]
    found = [(_url_of(home), key) for home in homes if (key := _key_of(home))]
    return next((one for one in found if one[0]), found[0] if found else (None, None))


def _key_of(home: Path) -> str | None:
    with contextlib.suppress(OSError):
        return (home / "admin.key").read_text().strip()
    return None


def _url_of(home: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        url = json.loads((home / "up.json").read_text())["api_url"]
        return url if isinstance(url, str) else None
    return None


def post_headers(idempotency_key: str | None) -> dict[str, str]:
    """Every POST carries a key, so that a retry after a lost answer makes nothing twice."""
    return {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}


def pause(attempt: int, response: httpx.Response | None) -> float:
    """Seconds before the next attempt: what the server said, if it did, else what is usual."""
    said = retry_after(response) if response is not None else None
    return pause_before(attempt) if said is None else min(said, MOST_PATIENCE_S)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds, as `Retry-After` says them; None where it says nothing, or a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d{1,9}", text) else None


def pause_before(attempt: int) -> float:
    """Seconds before the next attempt: doubling from 0.1 to 5, with jitter."""
    return min(0.1 * 2.0 ** min(attempt, 10), 5.0) * random.uniform(0.5, 1.0)


def checked(response: httpx.Response) -> httpx.Response:
    """The same. Raises APIError where the server refused."""
    if not response.is_success:
        raise refusal(response)
    return response


def quoted(path: str) -> str:
    """A path of a workspace in an address."""
    return quote(path, safe="/")


@contextlib.contextmanager
def _meant(url: httpx.URL | str) -> Iterator[None]:
    """Raises TenutoError for `..` in a path, which would name another thing, and for text that is no UTF-8."""
    if not {".", ".."}.isdisjoint(str(url).partition("?")[0].split("/")):
        raise TenutoError(f"{url}: there can be no . or .. in an id, a name or a path")
    try:
        yield
    except UnicodeEncodeError as error:
        raise TenutoError(f"this is no text in UTF-8 and cannot be sent: {error.object!r:.200}") from error


class Http(httpx.Client):
    """What is sent is what was meant, or is not sent."""

    def build_request(self, method: str, url: httpx.URL | str, **given: Any) -> httpx.Request:
        with _meant(url):
            return super().build_request(method, url, **given)


class AsyncHttp(httpx.AsyncClient):
    """The same, awaited."""

    def build_request(self, method: str, url: httpx.URL | str, **given: Any) -> httpx.Request:
        with _meant(url):
            return super().build_request(method, url, **given)


def segment(name: str | int) -> str:
    """An id or a name in an address, whatever is in it. Raises TenutoError where it cannot be one."""
    text = str(name)
    if text in ("", ".", ".."):
        raise TenutoError(f"{text!r} is no id")
    return quote(text, safe="@")


@contextlib.contextmanager
def whole_file(target: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that is there once all of it was written."""
    part = f"{os.fspath(target)}.part"
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def pieces_of(source: str | os.PathLike[str]) -> Iterator[bytes]:
    """A file's bytes, read as they are sent."""
    with open(source, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


async def apieces_of(source: str | os.PathLike[str]) -> AsyncIterator[bytes]:
    """A file's bytes, read as they are sent."""
    for piece in pieces_of(source):
        yield piece


def exec_body(command: str | Sequence[str], timeout_s: float, stdin: str) -> dict[str, Any]:
    argv = command if isinstance(command, str) else list(command)
    return {"command": argv, "timeout_s": timeout_s, **({"stdin": stdin} if stdin else {})}


def read_answer(response: httpx.Response) -> dict[str, Any]:
    """The body of an answer. Raises APIError where the server refused, TenutoError where it is no Tenuto server."""
    checked(response)
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise TenutoError(f"{response.url} did not answer as a Tenuto server does; check the address")
    return body


def refusal(response: httpx.Response) -> APIError:
    """The server's problem document as an error; whatever else came is shown as it is."""
    try:
        error: Mapping[str, Any] = response.json()["error"]
        said = str(error["code"]), str(error["message"]), error.get("param")
        return APIError(response.status_code, *said, retry_after(response))
    except (ValueError, KeyError, TypeError, AttributeError):
        return APIError(response.status_code, "unknown", response.text[:500] or response.reason_phrase)


def session_body(
    model: str,
    system: str | None,
    tools: Sequence[Given] | None,
    files: Mapping[str, str] | None,
    limits: Mapping[str, Any] | None,
    sampling: Mapping[str, Any] | None,
    kv: Mapping[str, Any] | None,
    seed: int | None,
    **more: Any,
) -> dict[str, Any]:
    """The body that makes a session: what was not given is left to the server."""
    given = {
        "model": model or None,
        "tools": declared(tools),
        "system": system,
        "files": files,
        "limits": limits,
        "sampling": sampling,
        "kv": kv,
        "seed": seed,
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def given(**values: Any) -> dict[str, Any]:
    """What was given of these, as a query or a body."""
    return {name: value for name, value in values.items() if value is not None}


def agent_body(content: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent says, functions among its tools as what they are to the server."""
    return {**content, "tools": declared(content["tools"])} if "tools" in content else dict(content)


def message_body(content: str, tool_choice: str, max_tool_rounds: int, on_busy: str | None) -> dict[str, Any]:
    body = {"content": content, "tool_choice": tool_choice, "max_tool_rounds": max_tool_rounds}
    return body if on_busy is None else {**body, "on_busy": on_busy}


def branch_body(step: int | None, seed: int | None, resume: bool) -> dict[str, Any]:
    given = {"step": step, "seed": seed, "resume": resume or None}
    return {name: value for name, value in given.items() if value is not None}


def ensure_applied(event: Event) -> None:
    """Raises TenutoError where a command was refused when its turn came."""
    if event.type == "command.refused":
        raise TenutoError(str(event.data.get("message", "the command was refused")))


class FrameReader:
    """Bytes of a stream in, events out, however the bytes are cut.

    Server-sent events as in the HTML standard: lines end in LF, CR or both; comments and fields that are not known
    are passed over, and so is a frame without an id, which is no event of the log. A frame counts once its blank
    line has come.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[str] = []
        self._has_id = False

    def feed(self, chunk: bytes) -> list[Event]:
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        return [event for line in lines if (event := self._line(line.decode("utf-8", "replace"))) is not None]

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._frame()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "id":
            self._has_id = True
        return None

    def _frame(self) -> Event | None:
        text, is_event = "\n".join(self._data), bool(self._data) and self._has_id
        self._data, self._has_id = [], False
        if not is_event:
            return None
        try:
            return Event.model_validate_json(text)
        except ValidationError as error:
            raise TenutoError(f"the server sent an event that cannot be read: {text[:200]!r}") from error


class Resume:
    """Where a stream stands across its connections: what to ask for next, and when to stop."""

    def __init__(self, server: Server, after: int) -> None:
        self._server = server
        self.after = after
        self.ended = False
        self._failures = 0
        self._reader = FrameReader()

    def connect(self) -> dict[str, str]:
        """Headers of the next connection. What the last one left unfinished is forgotten: it comes again."""
        self._reader = FrameReader()
        return {"Last-Event-ID": str(self.after), "Accept": "text/event-stream"}

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """New events of a chunk, each once; the last of a session ends the stream."""
        self._failures = 0  # the server speaks, if only to keep the connection
        for event in self._reader.feed(chunk):
            if event.id > self.after and not self.ended:
                self.after = event.id
                self.ended = event.type in STREAM_ENDS
                yield event

    def pause(self, error: Exception | None = None) -> float:
        """Seconds until the next connection. Raises ConnectionFailed after too many that brought nothing."""
        self._failures += 1
        if self._failures >= STREAM_ATTEMPTS:
            raise self._server.away(error) from error
        return min(pause_before(self._failures), 1.0)
