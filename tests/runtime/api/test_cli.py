"""Keys, tenants, usage and the log of operators on the command line, against a server that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtime.cli import main
from runtime.embedded import PostgresServer
from tests.runtime.api.conftest import KEY
from tests.runtime.api.server import api_process


@dataclass(frozen=True)
class Tenuto:
    """The command, with the server's address and its first key, or another one."""

    url: str

    def __call__(self, *arguments: str, key: str = KEY) -> Result:
        return CliRunner(env=self._environment(key)).invoke(main, arguments)

    def as_a_process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """For what is refused: it ends the process."""
        argv = [sys.executable, "-m", "runtime.cli", *arguments]
        environment = {**self._environment(KEY), "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run(argv, env=environment, text=True, capture_output=True, check=False)

    def _environment(self, key: str) -> dict[str, str]:
        return {"TENUTO_API_URL": self.url, "TENUTO_API_KEY": key}


@pytest.fixture(scope="module")
def tenuto(postgres_server: PostgresServer, temporal_address: str, model_path: Path) -> Iterator[Tenuto]:
    with api_process(postgres_server, temporal_address, model_path) as server:
        yield Tenuto(server.url)


def rows(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_key_is_made_used_rotated_and_revoked(tenuto: Tenuto) -> None:
    made = tenuto("keys", "create", "--name", "ci", "--expires-in", "90d", "--requests-per-minute", "600")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert tenuto("sessions", key=key).exit_code == 0
    (one,) = [row for row in rows(tenuto("keys", "list", "--json")) if row["name"] == "ci"]
    assert key.startswith(str(one["prefix"]))
    assert one["last_used_at"] is not None
    (turned,) = rows(tenuto("keys", "rotate", str(one["id"]), "--grace", "1h", "--json"))
    assert tenuto("sessions", key=str(turned["key"])).exit_code == 0
    assert f"{turned['id']} is revoked" in tenuto("keys", "revoke", str(turned["id"])).output
    assert (
        next(row["state"] for row in rows(tenuto("keys", "list", "--json")) if row["id"] == turned["id"]) == "revoked"
    )
    listed = tenuto("keys", "list").output
    assert {"ci", "revoked", "600"} <= set(listed.split())
    assert tenuto("keys", "rotate", "x", "--grace", "soon").exit_code == 2


def test_tenants_are_made_limited_and_disabled(tenuto: Tenuto) -> None:
    assert "acme is there" in tenuto("tenants", "create", "acme", "--sandboxes", "2").output
    said = tenuto("tenants", "limit", "acme", "--sandboxes", "none", "--open-sessions", "5").output
    assert said.strip() == "acme: open_sessions 5, tokens_per_day any, disk_bytes any, sandboxes any"
    assert "acme is disabled" in tenuto("tenants", "disable", "acme").output
    assert "disabled" in tenuto("tenants", "list").output
    assert "acme is enabled" in tenuto("tenants", "enable", "acme").output
    refused = tenuto.as_a_process("tenants", "disable", "default")
    assert (refused.returncode, "tenuto: default has the last admin key" in refused.stderr) == (1, True)
    assert tenuto("tenants", "limit", "acme", "--sandboxes", "few").exit_code == 2
    (last, *_) = rows(tenuto("audit", "--json", "--target", "acme"))
    assert (last["action"], last["outcome"]) == ("tenants.enable", "done")
    assert "tenants.disable" in tenuto("audit", "--outcome", "refused").output


def test_usage_is_told_as_a_table_and_as_csv(tenuto: Tenuto) -> None:
    assert "sampled tokens" in tenuto("usage", "--all", "--group-by", "tenant").output
    assert tenuto("usage", "--csv").stdout.splitlines()[0].startswith("id")
    assert rows(tenuto("usage", "--json")) == []
