"""`tenuto doctor` against the whole stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tenuto

from engine.doctor import KNOWN, PARTS
from runtime import bundle
from runtime.demo.stack import Stack
from tests.stack.test_cli import ran

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def test_the_stack_is_looked_at_and_bundled(stack: Stack, client: tenuto.AsyncClient, tmp_path: Path):
    session = await client.sessions.create(system="You are a lighthouse.", limits={"max_think_tokens": 20})
    await session.run("Say hello.")
    status, out, errors = await ran(stack, "doctor", "--json")
    reports = [json.loads(line) for line in out.splitlines()]
    assert [report["part"] for report in reports] == list(PARTS), errors
    bad = [finding for report in reports for finding in report["findings"] if finding["severity"] != "advice"]
    assert status == (1 if bad else 0)
    assert {finding["name"] for finding in bad} <= set(KNOWN)  # what other tests did to the stack counts too
    assert not [report["away"] for report in reports if report["away"]]
    _, said, _ = await ran(stack, "doctor", "memory", "--node", reports[0]["node"])
    assert "weights: 2" in said
    status, told, errors = await ran(stack, "doctor", "bundle", "--out", str(tmp_path / "b.tar.gz"), "--json")
    assert (status, json.loads(told)["missing"]) == (0, {}), errors
    files = dict(bundle.members((tmp_path / "b.tar.gz").read_bytes()))
    everything = b"".join(files.values())
    assert {"tenuto-bundle/logs/engine.log", "tenuto-bundle/logs/node.log"} <= set(files)
    secrets = (stack.api_key, (stack.settings.home / "secrets.key").read_text().strip(), "lighthouse", "Say hello")
    assert not [secret for secret in secrets if secret.encode() in everything]
    await session.cancel()
