"""The console in a real browser over a live stack: what an operator watches, and what they do; light and dark, narrow
and wide, by keyboard, without a word of complaint from the policy or from axe.

With SCREENSHOTS=docs/console the pictures of the documentation are taken anew.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import tenuto
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from runtime.demo.stack import Stack
from tests.stack.test_durable import NOTE
from tests.stack.test_sessions import sleeper

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.stack,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.browser,
]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).parents[1] / "console" / "vendor" / "axe.min.js"
PICTURES = os.environ.get("SCREENSHOTS")
WIDE, NARROW = {"width": 1360, "height": 900}, {"width": 390, "height": 840}
PATIENCE_MS = 60_000.0
LIMITS = {"max_think_tokens": 60}


@dataclass
class Watched:
    """An operator's browser, and what it complained of."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    def complain(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def go(self, path: str) -> None:
        answer = await self.page.goto(f"{self.url}/console{path}")
        assert answer is not None
        assert answer.status == 200, path

    async def confirm(self, name: str) -> None:
        """Press a button that loses something, and say so once more."""
        await self.page.get_by_role("button", name=f"{name}…").first.click()
        await expect(self.page.get_by_role("heading", name="What will be lost")).to_be_visible()
        await self.page.get_by_role("button", name=name, exact=True).click()

    async def told(self, what: str) -> None:
        await expect(self.page.get_by_role("status")).to_contain_text(what)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def opened(browser: Browser, stack: Stack, viewport: dict[str, int], scheme: str) -> Watched:
    context = await browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    watched = Watched(page, stack.api_url)
    page.on("console", watched.complain)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    await page.goto(f"{stack.api_url}/console/sessions")
    await page.get_by_label("Admin key").fill(stack.api_key)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    return watched


@pytest_asyncio.fixture(loop_scope="session")
async def operator(browser: Browser, stack: Stack) -> AsyncIterator[Watched]:
    watched = await opened(browser, stack, WIDE, "light")
    yield watched
    await watched.page.context.close()
    assert watched.complaints == []


async def test_a_refresh_takes_away_nothing_that_somebody_reads_and_says_when_there_is_none(
    operator: Watched, client: tenuto.AsyncClient
) -> None:
    sessions = [await client.sessions.create(limits=LIMITS) for _ in range(2)]
    await operator.go("/sessions")
    page = operator.page
    await page.locator("main").click()
    await page.keyboard.press("j")
    first = await page.locator("tr.at").get_attribute("id")
    sessions.append(await client.sessions.create(limits=LIMITS))
    await page.evaluate("refresh()")
    await expect(page.locator(f"[id='{sessions[-1].id}']")).to_be_visible()
    assert await page.locator("tr.at").get_attribute("id") == first
    await page.route("**/sessions", lambda route: route.fulfill(status=429, body="slower"))
    await page.evaluate("refresh()")
    await expect(page.locator("#stale")).to_contain_text("the API did not answer")
    operator.complaints.clear()
    await page.unroute("**/sessions")
    await page.evaluate("refresh()")
    await expect(page.locator("#stale")).to_be_hidden()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_contain_text(first or "")
    await page.get_by_label("Say something to it").fill("Hello.")
    await page.get_by_role("button", name="Send").click()
    await operator.told("accepted")
    await page.evaluate("refresh()")
    await operator.told("accepted")
    for session in sessions:
        await session.cancel()


async def test_a_session_is_watched_as_it_thinks_calls_a_tool_is_killed_and_goes_on(
    operator: Watched, stack: Stack, client: tenuto.AsyncClient
) -> None:
    session = await client.sessions.create(tools=[sleeper(4.0)], limits=LIMITS, seed=5)
    await operator.go(f"/sessions/default/{session.id}")
    page = operator.page
    await page.get_by_label("Say something to it").fill("Wait a while.")
    await page.get_by_role("button", name="Send").click()
    await operator.told("accepted")
    await expect(page.locator(".talk article.model .text").first).not_to_be_empty()
    await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
    await expect(page.locator(".talk article.tool")).to_contain_text("runs")
    stack.signal("node", signal.SIGKILL)
    await expect(page.locator(".talk article.tool summary")).to_contain_text("exit")
    await session.until("idle")
    await expect(page.locator("h1 .state")).to_have_text("idle")
    await expect(page.locator("table.lanes tbody tr")).to_have_count(len(await session.steps()))
    await session.cancel()


async def test_an_approval_is_given_with_what_the_tool_will_do_before_ones_eyes(
    operator: Watched, client: tenuto.AsyncClient
) -> None:
    session = await client.sessions.create(tools=[NOTE], approvals={"note": {}}, limits=LIMITS, seed=6)
    await session.send("Note it.", tool_choice="required", max_tool_rounds=1)
    await session.until("waiting")
    [question] = await session.questions()
    await operator.go("/approvals")
    card = operator.page.locator(f"#{question.id}")
    await expect(card).to_contain_text("note")
    await expect(card.locator("pre")).to_contain_text("{")
    await card.get_by_role("button", name="Approve").click()
    await operator.told("approved")
    await session.until("idle")
    assert "tool.settled" in [event.type for event in await session.events()]
    await session.cancel()


async def test_a_session_is_forked_rewound_and_its_pages_are_released(
    operator: Watched, client: tenuto.AsyncClient
) -> None:
    session = await client.sessions.create(limits=LIMITS, seed=7)
    await session.run("One.")
    await session.run("Two.")
    here = f"/sessions/default/{session.id}"
    await operator.go(here)
    await operator.page.locator(".tree li").last.get_by_role("button", name="Fork").click()
    await operator.told("begins as this one was")
    fork = operator.page.url.rsplit("/", 1)[-1]
    assert (await (await client.sessions.get(fork)).info()).forked_from is not None
    await operator.go(here)
    await operator.page.locator(".tree li").last.get_by_role("button", name="Rewind").click()
    await operator.page.get_by_role("button", name="Rewind", exact=True).click()
    await operator.told("goes back")
    await expect(operator.page.locator(".tree li.off").first).to_be_visible()
    await operator.confirm("Release KV")
    await operator.told("released")
    for one in (session, await client.sessions.get(fork)):
        await one.cancel()


async def test_sessions_are_cancelled_in_bulk_only_as_many_as_were_seen(
    operator: Watched, client: tenuto.AsyncClient
) -> None:
    made = [await client.sessions.create(limits=LIMITS, seed=n) for n in range(3)]
    await operator.go("/sessions?state=created")
    late = await client.sessions.create(limits=LIMITS, seed=9)
    await operator.page.get_by_role("button", name=re.compile(r"Cancel these \d+…")).click()
    seen = await operator.page.locator("dd", has_text=re.compile(r"^\d+$")).inner_text()
    await operator.page.get_by_role("button", name="Cancel all of these").click()
    if int(seen) == 3:  # the page had not been refreshed since the fourth came
        await operator.told("finds 4 open sessions, not 3")
        await operator.go("/sessions?state=created")
        await operator.page.get_by_role("button", name="Cancel these 4…").click()
        await operator.page.get_by_role("button", name="Cancel all of these").click()
    await operator.told("being cancelled")
    for one in (*made, late):
        await one.until("cancelled")


async def test_a_node_is_drained_and_wanted_back(operator: Watched, client: tenuto.AsyncClient) -> None:
    await operator.go("/nodes")
    await operator.confirm("Drain")
    await operator.told("takes no more sessions")
    await expect(operator.page.locator("main h2 .state")).to_have_text("drained")
    await operator.page.get_by_role("button", name="Undrain").click()
    await operator.told("starts anew")
    await expect(operator.page.locator("main h2 .state")).to_have_text("up")
    session = await client.sessions.create(limits=LIMITS, seed=1)
    await session.run("One.")
    await session.cancel()


async def test_the_keyboard_alone_finds_a_session_and_opens_it(operator: Watched, client: tenuto.AsyncClient) -> None:
    session = await client.sessions.create(limits=LIMITS, seed=2)
    page = operator.page
    await operator.go("/")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("g")
    await page.keyboard.press("s")
    await expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    await page.keyboard.press("/")
    await page.keyboard.type(session.id[4:])
    await page.keyboard.press("Enter")
    await expect(page.locator("tr[data-row]")).to_have_count(1)
    await page.locator("body").press("j")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1 .mono")).to_have_text(session.id)
    await session.cancel()


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"])
async def test_each_page_is_legible_in_both_schemes_and_widths_and_axe_finds_nothing(
    browser: Browser, stack: Stack, client: tenuto.AsyncClient, viewport: dict[str, int], scheme: str
) -> None:
    session = await client.sessions.create(tools=[NOTE], approvals={"note": {}}, limits=LIMITS, seed=6)
    await session.run("Say hello.", tool_choice="none")
    await session.send("Note it.", tool_choice="required", max_tool_rounds=1)
    await session.until("waiting")
    watched = await opened(browser, stack, viewport, scheme)
    place = f"/sessions/default/{session.id}"
    pages = {
        "fleet": "/",
        "sessions": "/sessions",
        "session": place,
        "files": f"{place}/files",
        "approvals": "/approvals",
        "kv": "/kv",
        "sandboxes": "/sandboxes",
        "nodes": "/nodes",
        "tenants": "/tenants",
        "tenant": "/tenants/default",
        "usage": "/usage",
        "audit": "/audit",
        "runbooks": "/runbooks",
        "runbook": "/runbooks/node-down",
        "confirm": f"/act/session.cancel?tenant=default&session={session.id}&back=/console/",
    }
    found: dict[str, object] = {}
    for name, path in pages.items():
        await watched.go(path)
        wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        if await watched.page.evaluate(wider):
            found[f"{name} scrolls sideways"] = True
        if serious := await _axe(watched.page):
            found[name] = serious
        if PICTURES:
            kind = "wide" if viewport == WIDE else "narrow"
            await watched.page.screenshot(path=Path(PICTURES) / f"{name}-{kind}.png")
    await watched.page.context.close()
    await session.cancel()
    assert (found, watched.complaints) == ({}, [])


async def _axe(page: Page) -> list[str]:
    """What axe finds of weight. It is put in from outside, where the page's own policy does not reach."""
    await page.evaluate(AXE.read_text())
    told = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['html'][:160]}"
        for one in told["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
