"""Alerts name metrics that there are, and pages that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import yaml
from fastapi import FastAPI

from runtime.api.metrics import METRICS
from runtime.console.views_people import RUNBOOKS
from tests.console.conftest import made

RULES = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    linked = {rule["annotations"]["runbook_url"].removeprefix("/console/runbooks/") for rule in RULES}
    assert linked == {path.stem for path in RUNBOOKS.glob("*.md")}
    for name in linked:
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert ("## Look first" in text, "## Then" in text) == (True, True), name


def test_alerts_are_about_metrics_that_there_are() -> None:
    for rule in RULES:
        named = set(re.findall(r"tenuto_\w+", rule["expr"]))
        assert named <= set(METRICS), rule["alert"]
        assert named or 'up{job="tenuto"}' in rule["expr"]


async def test_the_exposition_can_be_read_line_by_line(client: httpx.AsyncClient, app: FastAPI) -> None:
    await made(app, client)
    answer = await client.get("/v1/admin/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'(tenuto_\w+)(\{\w+="[^"]*"(,\w+="[^"]*")*\})? -?[0-9.e+-]+')
    kinds = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            assert (found := sample.fullmatch(line)), line
            assert found[1] in kinds or re.sub("_(bucket|sum|count)$", "", found[1]) in kinds, line
    assert 'tenuto_sessions{state="created"} 1' in answer.text
    assert 'tenuto_nodes{state="down"} 1' in answer.text
