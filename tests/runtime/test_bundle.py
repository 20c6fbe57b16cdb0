"""What a bundle holds, and above all what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime import bundle
from runtime.settings import Settings

ADMIN, TENANTS = "tk_0123456789abcdefghijABCDEFGHIJ01", "hunter2-of-a-tenant"
SEALING = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE="
DSN = "postgresql://someone:pa55w0rd@db.example.org/tenuto"
TOLD = "the ship sinks at noon"  # what a session says
SECRETS = (ADMIN, TENANTS, SEALING, "pa55w0rd", "sk-proj-abcdefgh12345678", "whsec_MfKQ9r8GKYqrTwjU")
LINES = (
    "2026-01-01 12:00:00,000 ERROR runtime.node: could not reach SECRET",
    "Authorization: Bearer SECRET",
    '{"headers": {"accept": "all"}, "password": "SECRET"}',
    "connecting to postgresql://user:SECRET@host/db",
    '  File "/x/y.py", line 3, in open  # api_key=SECRET',
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings.load({}, {"TENUTO_HOME": str(tmp_path), "TENUTO_POSTGRES_DSN": DSN, "TENUTO_SECRETS_KEY": SEALING})
    found.logs_dir.mkdir()
    found.admin_key_path.write_text(ADMIN + "\n")
    return found


def log(settings: Settings, *lines: str) -> str:
    (settings.logs_dir / "api.log").write_text("the first line may be cut\n" + "".join(f"{line}\n" for line in lines))
    scrubber = bundle.Scrubber([*bundle.secret_values(settings), TENANTS])
    return bundle.logs(settings, scrubber)["api"]


def test_settings_are_shown_and_secret_ones_only_as_set(settings: Settings):
    shown = bundle.shown(settings)
    assert (shown["TENUTO_POSTGRES_DSN"], shown["TENUTO_SECRETS_KEY"]) == ("(set)", "(set)")
    assert shown["TENUTO_KV_TOKENS"] == "16384"
    assert not any(secret in json.dumps(shown) for secret in SECRETS)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("line", LINES)
def test_a_secret_that_is_known_or_looks_like_one_is_in_no_line_of_a_log(settings: Settings, line: str, secret: str):
    text = log(settings, line.replace("SECRET", secret))
    assert secret not in text
    assert text.strip()


@pytest.mark.parametrize("line", [line for line in LINES if "reach" not in line])
def test_what_stands_where_a_secret_stands_is_in_no_line_either(settings: Settings, line: str):
    assert "ey.who.knows" not in log(settings, line.replace("SECRET", "ey.who.knows"))


def test_what_sessions_say_and_token_ids_are_not_kept(settings: Settings):
    text = log(
        settings,
        f"2026-01-01 ERROR postgres: DETAIL: Failing row contains ({TOLD})",
        f"STATEMENT: INSERT INTO messages VALUES ('{TOLD}')",
        f"pydantic: Input should be a string [type=string_type, input_value={{'text': '{TOLD}'}}, input_type=dict]",
        "token_ids [12, 7, 99, 4411, 5, 88, 1023] are too many",
        f"message '{TOLD}, and whoever is on it had better be a good swimmer by then' was refused",
        "2026-01-01 INFO runtime.node: reaped sandboxes without a session: sbx_1",
    )
    assert TOLD not in text
    assert "4411" not in text
    assert "reaped sandboxes without a session: sbx_1" in text


def test_only_the_end_of_a_log_is_kept_and_lines_are_cut(settings: Settings):
    text = log(settings, *("y" * 1000 for _ in range(1000)), "the last line")
    assert len(text) < bundle.LOG_BYTES
    assert text.endswith("the last line\n")
    assert max(map(len, text.splitlines())) <= 400


def test_known_secrets_and_keys_are_taken_out_of_every_part(settings: Settings):
    scrubber = bundle.Scrubber([*bundle.secret_values(settings), TENANTS])
    part = {"a": [f"x {TENANTS}", {f"Bearer {ADMIN}": 1}], "url": DSN, "n": 3, "none": None}
    told = json.dumps(scrubber.value(part))
    assert not any(secret in told for secret in (ADMIN, TENANTS, "pa55w0rd"))
    assert json.loads(told)["n"] == 3
    assert "db.example.org" in told


def test_digests_that_name_things_stay(settings: Settings):
    digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert bundle.Scrubber().value({"sha256": digest}) == {"sha256": digest}


def test_the_manifest_lists_what_is_in_it_and_what_is_not(settings: Settings):
    data = bundle.packed({"versions.json": bundle.versions()}, {"api": "a line\n"}, {"counts.json": "no database"})
    files = dict(bundle.members(data))
    manifest = json.loads(files["tenuto-bundle/manifest.json"])
    assert {one["name"] for one in manifest["files"]} == {"versions.json", "logs/api.log"}
    assert manifest["missing"] == {"counts.json": "no database"}
    assert json.loads(files["tenuto-bundle/versions.json"])["tenuto-server"]
    assert all(one["what"] and len(one["sha256"]) == 64 for one in manifest["files"])


def test_a_home_without_logs_has_none(tmp_path: Path):
    assert bundle.logs(Settings.load({}, {"TENUTO_HOME": str(tmp_path)}), bundle.Scrubber()) == {}
