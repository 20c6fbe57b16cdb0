"""Keys, tenants, usage and the log of operators on the command line, against a server that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tenuto as sdk
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


def test_a_secret_is_set_from_standard_input_and_shown_nowhere(tenuto: Tenuto) -> None:
    environment = {"TENUTO_API_URL": tenuto.url, "TENUTO_API_KEY": KEY}
    said = CliRunner(env=environment).invoke(main, ["secrets", "set", "FROM_STDIN"], input="a word of ours\n")
    assert (said.exit_code, said.stdout) == (0, "FROM_STDIN is set\n")
    (one,) = rows(tenuto("secrets", "list", "--json"))
    assert (one["id"], one["last_used_at"]) == ("FROM_STDIN", None)
    listed = tenuto("secrets", "list")
    assert ("FROM_STDIN" in listed.stdout, "a word" in listed.stdout) == (True, False)
    assert tenuto("secrets", "delete", "FROM_STDIN").stdout == "FROM_STDIN is deleted\n"
    assert CliRunner(env=environment).invoke(main, ["secrets", "set", "EMPTY"], input="\n").exit_code == 2


def test_agents_and_schedules_are_made_of_files(tenuto: Tenuto, tmp_path: Path) -> None:
    agent = tmp_path / "agent.toml"
    agent.write_text('name = "cli"\nsystem = "You are brief."\ntools = ["bash"]\nlimits = {max_think_tokens = 40}\n')
    assert tenuto("agents", "create", str(agent)).stdout == "cli@1 is made\n"
    assert tenuto("agents", "revise", "cli", str(agent)).stdout == "cli@1\n"
    agent.write_text('{"system": "You are long."}')
    refused = tenuto("agents", "revise", "cli", str(agent))
    assert (refused.exit_code, "cannot be read" in refused.output) == (2, True)
    other = tmp_path / "agent.json"
    other.write_text('{"system": "You are long."}')
    assert tenuto("agents", "revise", "cli", str(other)).stdout == "cli@2\n"
    assert [row["id"] for row in rows(tenuto("agents", "versions", "cli", "--json"))] == [2, 1]
    assert json.loads(tenuto("agents", "show", "cli@1").stdout)["limits"]["max_think_tokens"] == 40
    assert "cli" in tenuto("agents", "list").stdout

    plan = tmp_path / "plan.toml"
    plan.write_text('agent = "cli"\nmessage = "Say hello."\ncron = "0 9 * * mon-fri"\ntime_zone = "Europe/Berlin"\n')
    (made,) = rows(tenuto("schedules", "create", str(plan), "--json"))
    assert "0 9 * * mon-fri (Europe/Berlin)" in tenuto("schedules", "list").stdout
    plan.write_text("every_s = 3600\n")
    assert "every 3600 s" in tenuto("schedules", "change", str(made["id"]), str(plan)).stdout
    assert tenuto("schedules", "pause", str(made["id"])).stdout == f"{made['id']} is paused\n"
    assert rows(tenuto("schedules", "runs", str(made["id"]), "--json")) == []
    assert tenuto("schedules", "delete", str(made["id"])).exit_code == 0
    assert rows(tenuto("agents", "archive", "cli", "--json"))[0]["archived_at"] is not None


def test_a_webhook_to_a_host_that_is_not_listed_is_refused_in_a_sentence(tenuto: Tenuto) -> None:
    said = tenuto.as_a_process("webhooks", "create", "https://hooks.example.org/", "--type", "session.*")
    assert (said.returncode, "TENUTO_EGRESS_ALLOW" in said.stderr, "Traceback" in said.stderr) == (1, True, False)
    assert rows(tenuto("webhooks", "list", "--json")) == []


def test_sessions_are_listed_by_state_and_agent_and_shown(tenuto: Tenuto) -> None:
    with sdk.Client(tenuto.url, KEY) as client:
        client.agents.create("listed", system="You are brief.")
        made = [client.sessions.create(agent="listed", seed=seed) for seed in (1, 2)]
    found = rows(tenuto("sessions", "--agent", "listed", "--json"))
    assert [row["id"] for row in found] == [made[1].id, made[0].id]
    assert rows(tenuto("sessions", "list", "--agent", "listed@1", "--limit", "1", "--json")) == found[:1]
    assert rows(tenuto("sessions", "--agent", "listed", "--state", "idle", "--state", "failed", "--json")) == []
    listed = tenuto("sessions", "list", "--agent", "listed").stdout
    assert (made[0].id in listed, "listed@1" in listed, "\x1b" in listed) == (True, True, False)
    shown = tenuto("sessions", "show", made[0].id).stdout
    assert ("created" in shown, "You are brief." in shown) == (True, True)
    assert rows(tenuto("sessions", "show", made[0].id, "--json"))[0]["seed"] == 1
    assert rows(tenuto("sessions", "cancel", made[0].id, "--no-wait", "--json"))[0]["ending"] == "cancelled"
    assert tenuto("sessions", "--json", "show", made[0].id).exit_code == 2
    assert tenuto("sessions", "--state", "asleep").exit_code == 2


def test_what_happened_in_a_session_is_told_for_people_and_for_programs(tenuto: Tenuto) -> None:
    with sdk.Client(tenuto.url, KEY) as client:
        session = client.sessions.create(system="You are brief.")
        session.send("Say \x1b[31mtide.")
    events = rows(tenuto("logs", session.id, "--json"))
    assert [event["type"] for event in events] == ["session.created", "message.accepted"]
    assert rows(tenuto("logs", session.id, "--json", "--after", "1")) == events[1:]
    told = tenuto("logs", session.id).stdout.splitlines()
    assert ("message.accepted" in told[1], "Say [31mtide." in told[1], "\x1b" in told[1]) == (True, True, False)
    assert rows(tenuto("steps", session.id, "--json")) == rows(tenuto("checkpoints", session.id, "--json")) == []
    assert "kind" in tenuto("steps", session.id).stdout
    assert tenuto.as_a_process("logs", "ses_none").stderr == "tenuto: there is no session ses_none\n"
    (fork,) = rows(tenuto("fork", session.id, "--json"))
    assert fork["forked_from"] == {"session_id": session.id, "step": None}
    assert tenuto("rewind", session.id, "0").exit_code == 2


def test_questions_are_listed_and_one_that_is_none_is_a_sentence(tenuto: Tenuto) -> None:
    assert "question" in tenuto("approvals").stdout
    assert rows(tenuto("approvals", "--state", "answered", "--json")) == []
    assert tenuto.as_a_process("approve", "qst_none").stderr == "tenuto: there is no question qst_none\n"


def test_a_shell_completes_the_ids_of_sessions(tenuto: Tenuto) -> None:
    with sdk.Client(tenuto.url, KEY) as client:
        session = client.sessions.create()
    environment = {
        "COMP_WORDS": f"tenuto logs {session.id[:8]}",
        "COMP_CWORD": "2",
        "_TENUTO_COMPLETE": "bash_complete",
    }
    environment |= {"TENUTO_API_URL": tenuto.url, "TENUTO_API_KEY": KEY}
    said = CliRunner(env=environment).invoke(main, [], prog_name="tenuto", complete_var="_TENUTO_COMPLETE")
    assert f"plain,{session.id}" in said.output.splitlines()
