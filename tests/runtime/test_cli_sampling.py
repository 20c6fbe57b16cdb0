"""How a new session answers, as a command line says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from runtime.cli import main
from runtime.cli_sampling import made_of, sampling_options


@click.command()
@sampling_options
def told(**given: Any) -> None:
    click.echo(json.dumps(made_of(given)))


def said(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(told, words)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_nothing_said_leaves_it_to_the_server() -> None:
    assert said() == {}


def test_what_is_said_becomes_a_session(tmp_path: Path) -> None:
    schema = tmp_path / "answer.json"
    schema.write_text('{"type": "object"}')
    words = ["--temperature", "0.7", "--top-k", "0", "--min-p", "0.1", "--stop", "END", "--stop", "\n\n", "--seed", "3"]
    assert said(*words, "--max-tokens", "9", "--schema", str(schema)) == {
        "sampling": {"temperature": 0.7, "min_p": 0.1, "top_k": 0, "stop": ["END", "\n\n"]},
        "seed": 3,
        "limits": {"max_think_tokens": 9},
        "response_format": {"type": "json_schema", "json_schema": {"type": "object"}},
    }
    assert said("--pattern", "yes|no")["response_format"] == {"type": "regex", "pattern": "yes|no"}


@pytest.mark.parametrize(("content", "says"), [("[1]", "it is no object"), ("{", "line 1")])
def test_a_file_that_is_no_schema_is_a_sentence(tmp_path: Path, content: str, says: str) -> None:
    schema = tmp_path / "answer.json"
    schema.write_text(content)
    result = CliRunner().invoke(told, ["--schema", str(schema)])
    assert result.exit_code == 2
    assert says in result.output


def test_two_forms_of_one_answer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    result = CliRunner().invoke(told, ["--schema", str(tmp_path / "a.json"), "--pattern", "a"])
    assert "give one of them" in result.output


def test_a_session_that_there_is_keeps_how_it_answers() -> None:
    result = CliRunner().invoke(main, ["run", "Hi.", "--session", "ses_1", "--top-p", "0.5"])
    assert result.exit_code == 2
    assert "--top-p says what a new session is made of" in result.output
