"""Whatever README.md and docs/*.md tell a reader to type is typed here, as it stands.

Commands and Python run against the stack, in the order of the page. What cannot run here is in INSTEAD with how it is
checked; what is neither fails. Names that stand for what a reader has (SESSION, an address) are those of PLACES.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tenuto

from runtime.demo.stack import Stack
from runtime.prices import Prices
from runtime.settings import Settings
from tests.runtime.tools.servers import Seen
from tests.stack.pages import ALL, PAGES, ROOT, Block, commands, in_language, objects, output

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

IN_A_SANDBOX = "in a sandbox of that session"
LANGUAGES = {"sh", "console", "python", "json", "mermaid", "text"}
SHELL = [block for block in in_language("sh", "console") if block.note != IN_A_SANDBOX]
ENDED = ("cancelled", "completed")


def a_target_of_the_makefile(command: str) -> None:
    for target in shlex.split(command, comments=True)[1:]:
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def options_of_a_bench(command: str) -> None:
    _, _, module, *arguments = shlex.split(command, comments=True)
    asked = [sys.executable, "-m", module, "--help"]
    help_text = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout
    known = set(re.findall(r"--[a-z][a-z0-9-]*", help_text))
    assert {one for one in arguments if one.startswith("--")} <= known, command


def settings_of_a_stack(command: str) -> None:
    """In front of a model server that the reader has."""
    words = shlex.split(command, comments=True)
    given = dict(word.split("=", 1) for word in words if word.startswith("TENUTO_"))
    model = words[words.index("--model") + 1]
    assert Settings.load(given, {"TENUTO_MODEL": model}).external is not None


INSTEAD: tuple[tuple[str, Callable[[str], None]], ...] = (
    (r"make ", a_target_of_the_makefile),
    (r"(\.venv/bin/)?python -m bench\.", options_of_a_bench),
    (r"(TENUTO_\w+=\S+ )?tenuto up --model openai:", settings_of_a_stack),
)


def instead(command: str) -> Callable[[str], None] | None:
    return next((check for pattern, check in INSTEAD if re.match(pattern, command)), None)


class Reader:
    """Somebody with a running stack who follows the pages from the top, in one folder."""

    def __init__(self, stack: Stack, client: tenuto.AsyncClient, web: Seen, folder: Path) -> None:
        self._stack, self._client, self._web = stack, client, web
        self._folder = folder
        (folder / ".venv").symlink_to(sys.prefix)

    @property
    def client(self) -> tenuto.AsyncClient:
        return self._client

    @property
    def web(self) -> Seen:
        return self._web

    def typed(self, argv: list[str], given: str = "") -> None:
        """Run it as the reader would. Fails with what it said."""
        ran = subprocess.run(
            argv,
            cwd=self._folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "TENUTO_HOME": str(self._stack.settings.home),
                "TENUTO_API_URL": self._stack.api_url,
                "TENUTO_API_KEY": self._stack.api_key,
            },
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{ran.stderr}\n{ran.stdout}"

    async def in_place(self, text: str) -> str:
        """With what the reader has in place of what stands for it."""
        fixed = {
            "localhost:8300": self._stack.api_url.removeprefix("http://"),
            "/var/lib/tenuto/admin.key": str(self._stack.settings.home / "admin.key"),
            "https://hooks.example.org/tenuto": f"{self._web.url}/readme",
            "https://api.example.org": self._web.url,
            "https://mcp.example.org": self._web.url,
        }
        for name, own in fixed.items():
            text = text.replace(name, own)
        for pattern, make in PLACES.items():
            if re.search(pattern, text):
                made = await make(self)
                text = re.sub(pattern, made, text)
        return text


async def a_session(reader: Reader) -> str:
    session = await reader.client.sessions.create(tools=["bash"], limits={"max_think_tokens": 30}, seed=3)
    await session.run("Look around.", tool_choice="required", max_tool_rounds=1)
    return session.id


async def a_webhook(reader: Reader) -> str:
    made = await reader.client.post("/v1/webhooks", {"url": f"{reader.web.url}/readme", "types": ["session.idle"]})
    return str(made["id"])


async def a_delivery(reader: Reader) -> str:
    """Of the latest webhook, which PLACES has made just before."""
    [hook, *_] = (await reader.client.get("/v1/webhooks"))["data"]
    await reader.client.post(f"/v1/webhooks/{hook['id']}/test")
    while True:
        [sent, *_] = (await reader.client.get(f"/v1/webhooks/{hook['id']}/deliveries"))["data"]
        if sent["state"] == "delivered":
            return str(sent["id"])
        await asyncio.sleep(0.1)


async def a_schedule(reader: Reader) -> str:
    wanted = {"agent": "reviewer", "message": "Review.", "cron": "0 9 1 1 *"}
    return str((await reader.client.post("/v1/schedules", wanted))["id"])


async def a_key(reader: Reader) -> str:
    return str((await reader.client.post("/v1/admin/keys", {"name": "readme"}))["id"])


PLACES: dict[str, Callable[[Reader], Any]] = {
    r"\bSESSION\b": a_session,
    r"\bWEBHOOK\b": a_webhook,
    r"\bDELIVERY\b": a_delivery,
    r"\bSCHEDULE\b": a_schedule,
    r"\bkey_[0-9a-f]{24}\b": a_key,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reader(stack: Stack, web: Seen, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reader]:
    """Afterwards nothing goes on that a page has begun."""
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        before = {info.id async for info in client.sessions.list()}
        yield Reader(stack, client, web, tmp_path_factory.mktemp("readme"))
        for kind in ("schedules", "webhooks"):
            for one in (await client.get(f"/v1/{kind}"))["data"]:
                await client.delete(f"/v1/{kind}/{one['id']}")
        async for info in client.sessions.list():
            if info.id not in before and info.state not in ENDED:
                await (await client.sessions.get(info.id)).cancel()


async def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []
    assert {block.note for block in ALL} <= {"", IN_A_SANDBOX}
    fences = [
        line for path in PAGES for line in path.read_text().splitlines() if line.lstrip().startswith(("```", "~~~"))
    ]
    assert len(fences) == 2 * len(ALL), "a block is not closed, or not fenced as the others are"


@pytest.mark.parametrize(
    ("language", "text", "found"),
    [
        ("sh", "a b   # c\n\n# d\ne\n", ["a b   # c", "e"]),
        ("sh", "a \\\n  b\nc", ["a \\\n  b", "c"]),
        ("sh", "a 'b\nc' d\ne", ["a 'b\nc' d", "e"]),
        ("sh", "cat > a <<'END'\nit's\n# b\nEND\nc", ["cat > a <<'END'\nit's\n# b\nEND", "c"]),
        ("console", "$ a\nsays b\n$ c", ["a", "c"]),
    ],
)
async def test_a_command_is_taken_whole(language: str, text: str, found: list[str]) -> None:
    assert list(commands(Block("page", 1, language, text, ""))) == found


@pytest.mark.parametrize("block", in_language("python"), ids=str)
async def test_python_runs_as_it_stands(reader: Reader, block: Block) -> None:
    await asyncio.to_thread(reader.typed, [sys.executable, "-c", block.text])


@pytest.mark.parametrize("block", SHELL, ids=str)
async def test_commands_run_as_they_stand(reader: Reader, block: Block) -> None:
    """Those of a block in one bash, since a later one may need what an earlier one has set."""
    asked = list(commands(block))
    assert asked
    for command in asked:
        if check := instead(command):
            await asyncio.to_thread(check, command)
    script = await reader.in_place("\n".join(command for command in asked if not instead(command)))
    # A stream that is followed ends with its session; here it has been seen to work once the session rests.
    script = re.sub(r"^(curl -N .*)$", r'grep -qm1 "^event: session.idle" < <(\1)', script, flags=re.MULTILINE)
    told = "set -Eeo pipefail\ntrap 'echo \"failed: $BASH_COMMAND\" >&2' ERR\n"
    if script:
        await asyncio.to_thread(reader.typed, ["bash", "-c", told + script], "a value of my own\n")


@pytest.mark.parametrize("block", in_language("json"), ids=str)
async def test_json_is_taken_or_is_what_is_sent(reader: Reader, block: Block) -> None:
    for one in objects(block):
        match one:
            case {"type": str(kind), "timestamp": _, **_rest}:
                assert shape(one) == shape(await an_event_as_it_is_sent(reader, kind))
            case {"type": "sandbox.egress_denied", **_rest}:
                pass  # beside its command, below
            case {"currency": _, **_rest}:
                Prices.model_validate(one)
            case _:
                await taken(reader, one)


async def taken(reader: Reader, one: dict[str, Any]) -> None:
    """A session's body, a tool of one, or what any tool may have; made by the API itself."""
    body = one
    if "tools" not in one or "name" in one:
        whole = {"type": "http", "name": "any", "description": "Any.", "url": "https://api.example.org/"}
        body = {"tools": [one if "name" in one else {**whole, **one}]}
    await reader.client.put("/v1/secrets/GITHUB_TOKEN", {"value": "a value of my own"})
    await reader.client.post("/v1/sessions", json.loads(await reader.in_place(json.dumps(body))))


async def an_event_as_it_is_sent(reader: Reader, kind: str) -> dict[str, Any]:
    hook = await reader.client.post("/v1/webhooks", {"url": f"{reader.web.url}/told", "types": [kind]})
    await a_session(reader)
    while True:
        for request in reader.web.requests:
            if request["path"] == "/told" and (body := json.loads(request["body"]))["type"] == kind:
                await reader.client.delete(f"/v1/webhooks/{hook['id']}")
                return body
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("block", [block for block in ALL if block.note == IN_A_SANDBOX], ids=str)
async def test_a_command_in_a_sandbox_says_what_the_page_says(reader: Reader, block: Block) -> None:
    """In a session of the JSON block before it, whose events are as the one behind it shows."""
    here = ALL.index(block)
    [body], [event] = objects(ALL[here - 1]), objects(ALL[here + 1])
    session = await reader.client.sessions.create(**body)
    [command] = commands(block)
    ran = await session.exec(command)
    assert ran.output.split() == output(block).split()
    [denied] = [one for one in await session.events() if one.type == event["type"]]
    assert denied.data == event["data"]


def shape(value: Any) -> Any:
    """The names, and of what kind each value is."""
    return {name: shape(one) for name, one in value.items()} if isinstance(value, dict) else type(value)
