"""A node without an engine: a real Postgres, real sandboxes, real servers; the thoughts are written by the tests."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine import EngineGone, ModelCard
from engine.tokens import load_chat_format
from runtime.config import SessionConfig
from runtime.sealing import Sealer
from runtime.steps import checkpoints, inputs, tooling
from runtime.steps.blob_lock import BlobLock
from runtime.steps.resting import usual_spec
from runtime.steps.services import Services
from runtime.steps.unsealing import Opened
from runtime.store import Database, fleet, sandboxes, sessions, steps
from runtime.store.values import Owner
from runtime.tools.egress import Egress
from runtime.tools.redacting import Redactor
from sandbox import BlobStore, Budget, Driver, Handle, Pool, Sandbox, Volume
from sandbox.allow import parse_allow
from sandbox.bubblewrap import BubblewrapDriver, why_not
from tests.runtime.tools import servers
from workflows.contract import InputIn, StepIn
from workflows.states import Event as Move

LIBRARIES = Volume(Path(sysconfig.get_path("purelib")), "/mnt/libs")
SERVER = Path(servers.__file__).with_name("mcp_server.py").read_text()
STDIO = {
    "type": "mcp",
    "name": "counting",
    "command": ["env", "PYTHONPATH=/mnt/libs", "python3", "/work/server.py", "stdio"],
    "env": {"SECRET_WORD": "hunter22", "COUNT_FILE": "/work/counted"},
}
CARD = ModelCard("m", "f", "cpu", "exact", "bf16", 8192, 49152, 1, 16, "t", "b", (2,), 16384)


class NoEngine:
    """Its card is known; pages are nobody's concern here."""

    card = CARD

    async def client(self) -> Any:
        raise EngineGone("there is none")


class Node:
    """Sessions told step by step, whose tool steps really run."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.db = services.db
        self.tokens = map(str, itertools.count())
        self.values = Opened(services.sealer, fleet.DEFAULT_TENANT)

    def allowing(self, allow: str) -> Node:
        return Node(dataclasses.replace(self.services, egress=Egress(parse_allow(allow))))

    def hiding(self, *values: str) -> Node:
        """Whose thinks keep these out of the record, as a real think does."""
        hiding = Node(self.services)
        hiding.values = Opened(self.services.sealer, fleet.DEFAULT_TENANT, redactor=Redactor(values))
        return hiding

    def again(self) -> Node:
        """Another node that takes over, with nothing in its memory."""
        return Node(dataclasses.replace(self.services, boot="another"))

    async def session(self, tools: Sequence[Any], **config: Any) -> str:
        """A session with one message, not taken yet."""
        session_id = sessions.new_id("ses")
        files = {"server.py": SERVER, **config.pop("files", {})}
        made = SessionConfig(model="m", tools=tools, files=files, **config)
        await sessions.create(self.db, fleet.DEFAULT_TENANT, session_id, made.model_dump(), 1)
        options = {"tool_choice": "auto", "max_tool_rounds": 2}
        await sessions.accept_message(
            self.db, fleet.DEFAULT_TENANT, session_id, sessions.new_id("msg"), "hello", options
        )
        return session_id

    async def place(self, session_id: str) -> Owner:
        placed = await sessions.place(self.db, session_id, self.services.node_id, self.services.boot)
        return self.services.owner(session_id, placed.epoch)

    async def take(self, session_id: str) -> Owner:
        owner = await self.place(session_id)
        await inputs.take(self.services, InputIn(session_id, owner.epoch, 1, "m"), next(self.tokens))
        return owner

    async def think(self, owner: Owner, *calls: tuple[str, Mapping[str, Any]], step: int = 2) -> None:
        """A think that ends in these calls."""
        attempt = await steps.begin(self.db, owner, step, "think", Move.THINK, token=next(self.tokens))
        before = await steps.transcript(self.db, owner.session_id, step)
        root, tail = await checkpoints.last(self.services.db, owner.session_id)
        said = [{"name": name, "arguments": dict(given)} for name, given in calls]
        output = {"outcome": "tools", "calls": self.values.hide(said)}
        made = checkpoints.carried(self.services.engine.card, before, root, tail)
        await steps.complete(self.db, owner, attempt, segments=[], output=output, checkpoint=made)

    async def run(self, owner: Owner, step: int = 3) -> None:
        await tooling.run_tools(self.services, StepIn(owner.session_id, owner.epoch, step), next(self.tokens))

    async def interrupt(self, owner: Owner, step: int = 3) -> None:
        session = await sessions.get(self.db, owner.session_id)
        config = SessionConfig.model_validate(session.config)
        what = StepIn(owner.session_id, owner.epoch, step)
        await tooling.interrupt_tools(self.services, owner, config, what, next(self.tokens))

    async def called(self, session_id: str, *calls: tuple[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The whole of a first turn: message, think, calls. Returns the ledger's rows."""
        owner = await self.take(session_id)
        await self.think(owner, *calls)
        await self.run(owner)
        return await self.ledger(session_id)

    async def ledger(self, session_id: str) -> list[dict[str, Any]]:
        rows = await self.db.fetch(
            "SELECT * FROM tool_calls WHERE session_id = $1 ORDER BY step_no, call_no", session_id
        )
        return [dict(row) for row in rows]

    async def events(self, session_id: str, kind: str = "%") -> list[dict[str, Any]]:
        rows = await self.db.fetch(
            "SELECT type, data FROM events WHERE session_id = $1 AND type LIKE $2 ORDER BY pos", session_id, kind
        )
        return [{"type": row["type"], **row["data"]} for row in rows]

    async def sandbox(self, owner: Owner) -> Sandbox:
        row = await sandboxes.of_session(self.db, owner.session_id)
        assert row is not None
        return await self.services.driver.attach(Handle.from_json(row["handle"]), epoch=owner.epoch)


@pytest.fixture(scope="session")
def sandbox_home() -> Iterator[Path]:
    """Where other users can read too: as root, sandboxes are other users."""
    with tempfile.TemporaryDirectory(prefix="tenuto-home-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest_asyncio.fixture
async def driver(sandbox_home: Path, tmp_path: Path) -> AsyncIterator[Driver]:
    if reason := why_not():
        pytest.skip(reason)
    opened = await BubblewrapDriver.open(sandbox_home, tmp_path / "run")
    yield opened
    await opened.reap([])


@pytest_asyncio.fixture
async def node(db: Database, driver: Driver, model_path: Path, tmp_path: Path) -> Node:
    tokenizer, chat = load_chat_format(model_path)
    await fleet.ensure_admin(db, "key")
    blobs = BlobStore(tmp_path / "blobs")
    engine: Any = NoEngine()
    pool = Pool(driver, usual_spec((LIBRARIES,)), Budget(most=0))
    lock = BlobLock(tmp_path / "blobs.lock")
    return Node(
        Services(
            "n", "boot", db, engine, tokenizer, chat, driver, blobs, (LIBRARIES,), lock, pool, sealer=Sealer(bytes(32))
        )
    )


@pytest.fixture
def web() -> Iterator[servers.Seen]:
    with servers.http_server() as seen:
        yield seen
