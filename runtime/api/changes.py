"""`/v1/sessions/{id}/sandbox`: what it is, and changes of its workspace from outside: files, archives, commands.

A change is accepted by its row before anything is done, and made by the session's node at a boundary between steps. The
answer waits for that; where it takes too long, it says `accepted`, and the change is looked up by its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from pydantic import ConfigDict, Field, field_validator

from runtime import delivery
from runtime.api import views
from runtime.api.documented import Id, Shape, refusals
from runtime.api.files import FilePath, checked_path
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.sending import send
from runtime.config import Body
from runtime.errors import NotFound, refusal
from runtime.store import Database, alterations, commands
from runtime.store.alterations import Outcome

router = APIRouter(prefix="/v1/sessions/{session_id}/sandbox", tags=["sandbox"])

WITHIN_S: Final = 20.0  # for what takes no time once its turn has come
LOOK_EVERY_S: Final = 5.0  # the net below a lost notification
BYTES: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
Mode = Annotated[str, Query(pattern=r"^[01]?[0-7]{3}$", description="Permissions in octal.")]
Wait = Annotated[
    float | None, Query(ge=0, le=60, description="Seconds to wait for it to be done; then the answer is 202.")
]
LATER: Final = "Accepted; it is done in its turn."


class Altered(Shape):
    """A change of the workspace. `step`: the step that says so, to fork or rewind to; null while it is `accepted`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "cmd_0f",
                    "object": "workspace.change",
                    "session_id": "ses_0a",
                    "kind": "write",
                    "state": "done",
                    "step": 5,
                    "path": "notes.txt",
                    "size": 5,
                    "sha256": None,
                    "files": None,
                }
            ]
        },
    )

    id: str
    object: Literal["workspace.change"] = "workspace.change"
    session_id: str
    kind: Literal["write", "remove", "unpack"]
    state: Literal["accepted", "done"]
    step: int | None = None
    path: str | None = None
    size: int | None = Field(default=None, description="Bytes that came in.")
    sha256: str | None = None
    files: int | None = Field(default=None, description="How many files an archive had.")


class ExecIn(Body):
    """The body of POST …/exec: an argument list, or a text for `bash -c`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"command": ["python3", "-V"]}]})

    command: (
        Annotated[str, Field(min_length=1, max_length=100_000)]
        | Annotated[list[Annotated[str, Field(max_length=100_000)]], Field(min_length=1, max_length=1000)]
    )
    timeout_s: float = Field(default=60.0, gt=0, le=600)
    stdin: str = Field(default="", max_length=4 << 20)

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, value: str | list[str]) -> str | list[str]:
        if not value[0]:
            raise ValueError("names no program: its first item is empty")
        if not isinstance(value, str) and sum(map(len, value)) > 100_000:
            raise ValueError("is longer than 100000 characters")
        return value

    @property
    def argv(self) -> list[str]:
        return ["bash", "-c", self.command] if isinstance(self.command, str) else self.command


class Ran(Shape):
    """A command that ran in the session's sandbox. `reason`: exit, signal, timeout, oom; or `outcome_unknown`, where
    its sandbox was lost while it ran: it may have taken effect, and is not run again."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "cmd_0f",
                    "object": "exec",
                    "session_id": "ses_0a",
                    "state": "done",
                    "step": 5,
                    "exit": 0,
                    "reason": "exit",
                    "output": "Python 3.12.3\n",
                    "output_truncated": False,
                    "duration_s": 0.02,
                    "not_kept": [],
                }
            ]
        },
    )

    id: str
    object: Literal["exec"] = "exec"
    session_id: str
    state: Literal["accepted", "done"]
    step: int | None = None
    exit: int | None = Field(default=None, description="The exit code, or the number of the signal.")
    reason: str | None = None
    output: str | None = Field(default=None, description="Both streams as they came, at most 256 KiB.")
    output_truncated: bool = False
    duration_s: float | None = None
    not_kept: list[str] = Field(default_factory=list, description="What no snapshot keeps, and why.")


OF_A_CHANGE: Final = {202: {"model": Altered, "description": LATER}, **refusals(404, 409)}


@router.put("/files/{path:path}", responses=OF_A_CHANGE, openapi_extra=BYTES)
async def write_file(
    session_id: Id,
    path: FilePath,
    request: Request,
    response: Response,
    db: Db,
    tenant: Tenant,
    mode: Mode = "0644",
    wait_s: Wait = None,
) -> Altered:
    """Put a file into the workspace, its folders made, what was there replaced. The body is its bytes (8 MiB at most).
    Not while the session works."""
    argument = {"path": checked_path(path), "mode": int(mode, 8)}
    body = await request.body()
    accepted = await _accept(request, db, tenant, session_id, "write", argument, body)
    return _as_altered(session_id, await _outcome(request, response, db, accepted, wait_s))


@router.delete("/files/{path:path}", responses=OF_A_CHANGE)
async def remove_file(
    session_id: Id, path: FilePath, request: Request, response: Response, db: Db, tenant: Tenant, wait_s: Wait = None
) -> Altered:
    """Remove a file, a link, or a folder with all that is in it."""
    accepted = await _accept(request, db, tenant, session_id, "remove", {"path": checked_path(path)}, None)
    return _as_altered(session_id, await _outcome(request, response, db, accepted, wait_s))


@router.post("/archive", responses=OF_A_CHANGE, openapi_extra=BYTES)
async def unpack(
    session_id: Id, request: Request, response: Response, db: Db, tenant: Tenant, wait_s: Wait = None
) -> Altered:
    """Put all files of a tar archive (plain, gzip, bzip2 or xz; 8 MiB at most) into the workspace, over what is there.
    Absolute names, `..`, links that leave the workspace and devices are refused, and nothing is changed then."""
    accepted = await _accept(request, db, tenant, session_id, "unpack", {}, await request.body())
    return _as_altered(session_id, await _outcome(request, response, db, accepted, wait_s))


@router.get("/changes/{change_id}", responses=refusals(404, 409))
async def get_change(session_id: Id, change_id: Id, db: Db, tenant: Tenant) -> Altered:
    """How a change stands. One that was refused is answered as it was."""
    await views.owned(db, tenant, session_id)
    return _as_altered(session_id, await _found(db, session_id, change_id, of_exec=False))


@router.post("/exec", responses={202: {"model": Ran, "description": LATER}, **refusals(404, 409)})
async def execute(
    session_id: Id, body: ExecIn, request: Request, response: Response, db: Db, tenant: Tenant, wait_s: Wait = None
) -> Ran:
    """Run a command in the session's sandbox, as its tools run: same limits, same network, no secrets. Not while the
    session works; a message that comes meanwhile waits for it."""
    argument = {"command": body.argv, "timeout_s": body.timeout_s}
    accepted = await _accept(request, db, tenant, session_id, "exec", argument, body.stdin.encode())
    within_s = WITHIN_S + body.timeout_s if wait_s is None else wait_s
    return _as_ran(session_id, await _outcome(request, response, db, accepted, within_s))


@router.get("/exec/{exec_id}", responses=refusals(404, 409))
async def get_exec(session_id: Id, exec_id: Id, db: Db, tenant: Tenant) -> Ran:
    """How a command stands, and what it printed."""
    await views.owned(db, tenant, session_id)
    return _as_ran(session_id, await _found(db, session_id, exec_id, of_exec=True))


class Accepted(NamedTuple):
    session_id: str
    command_id: str
    verb: str


async def _accept(
    request: Request,
    db: Database,
    tenant: str,
    session_id: str,
    verb: str,
    argument: dict[str, Any],
    body: bytes | None,
) -> Accepted:
    await views.owned(db, tenant, session_id)
    asked = json.dumps([verb, argument]).encode() + (body or b"")
    digest = hashlib.sha256(asked).digest()  # what stands in the query counts too, but for how long to wait
    command_id = await made_before(request, db, tenant, digest=digest)
    if command_id is None or not await commands.exists(db, command_id):
        command_id = await id_for(request, db, tenant, "cmd", digest=digest)
        await commands.accept(db, tenant, session_id, command_id, verb, argument, body)
    return Accepted(session_id, command_id, verb)


async def _outcome(
    request: Request, response: Response, db: Database, accepted: Accepted, wait_s: float | None
) -> Outcome:
    """Once it is done, or as it stands then. Raises what it was refused with."""
    session_id, command_id, verb = accepted
    deadline = time.monotonic() + (WITHIN_S if wait_s is None else wait_s)
    with request.app.state.hub.following(session_id) as (_, reader):
        while True:
            reader.woken.clear()  # before the read: whatever it does not see yet wakes
            found = await alterations.outcome(db, session_id, command_id)
            assert found is not None
            if found.state == "accepted":
                send(request, delivery.command(request.app.state.temporal, session_id, command_id, verb))
            left_s = deadline - time.monotonic()
            if found.state != "accepted" or left_s <= 0:
                break
            try:
                await asyncio.wait_for(reader.woken.wait(), min(left_s, LOOK_EVERY_S))
            except TimeoutError:
                continue
    if found.state == "accepted":
        response.status_code = 202
    return _unless_refused(found)


async def _found(db: Database, session_id: str, command_id: str, *, of_exec: bool) -> Outcome:
    found = await alterations.outcome(db, session_id, command_id)
    if found is None or (found.verb == "exec") is not of_exec:
        raise NotFound(f"session {session_id} has no {'exec' if of_exec else 'change'} {command_id}")
    return _unless_refused(found)


def _unless_refused(found: Outcome) -> Outcome:
    if found.state == "refused":
        told = found.result or {"status": 409, "code": "conflict"}
        raise refusal({**told, "message": found.error})
    return found


def _as_altered(session_id: str, found: Outcome) -> Altered:
    told = {name: (found.result or {}).get(name) for name in ("step", "path", "size", "sha256", "files")}
    return Altered.model_validate(
        {"id": found.command_id, "session_id": session_id, "kind": found.verb, "state": found.state, **told}
    )


def _as_ran(session_id: str, found: Outcome) -> Ran:
    output = None if found.output is None else found.output.decode("utf-8", "replace")
    about = {"id": found.command_id, "session_id": session_id, "state": found.state, "output": output}
    return Ran.model_validate({**(found.result or {}), **about})
