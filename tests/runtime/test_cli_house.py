"""What every command has in common: words, --json, and no surprise in the environment or at a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from runtime.cli import main
from runtime.settings import KEYS
from runtime.settings_words import WORDS

# Print what is no record: a script for a shell, the bytes of a file, a protocol, progress.
WITHOUT_JSON = {"completion", "files get", "mcp", "model pull"}


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from leaves(one, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(leaves(main))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_words_and_json(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert ("--json" in [flag for one in command.params for flag in one.opts]) == (name not in WITHOUT_JSON)
    assert CliRunner().invoke(main, [*name.split(), "--help"]).exit_code == 0


def test_every_setting_has_its_words_in_the_help() -> None:
    assert WORDS.keys() == KEYS.keys()
    shown = CliRunner().invoke(main, ["up", "--help"]).output
    assert [key for key, words in WORDS.items() if f"{key:<28} {words}" not in shown] == []


def as_a_process(*argv: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """For what ends the process."""
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    command = [sys.executable, "-m", "runtime.cli", *argv]
    return subprocess.run(command, env=given, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("argv", [["nodes"], ["run", "x"]])
def test_a_misspelt_setting_is_refused_by_every_command(argv: list[str]) -> None:
    done = as_a_process(*argv, TENUTO_MODLE="x")
    said = "tenuto: TENUTO_MODLE is no setting of Tenuto; did you mean TENUTO_MODEL?\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    said = CliRunner().invoke(main, ["completion", shell])
    assert (said.exit_code, "_TENUTO_COMPLETE" in said.stdout) == (0, True)


def test_completion_is_empty_where_no_server_answers() -> None:
    environment = {"COMP_WORDS": "tenuto logs ", "COMP_CWORD": "2", "_TENUTO_COMPLETE": "bash_complete"}
    environment |= {"TENUTO_API_URL": "http://127.0.0.1:1", "TENUTO_API_KEY": "k"}
    said = CliRunner(env=environment).invoke(main, [], prog_name="tenuto", complete_var="_TENUTO_COMPLETE")
    assert (said.exit_code, said.output.strip()) == (0, "")


def test_a_reader_that_stops_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = as_a_process("model", "list", "--json", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([" "], "the task is empty"),
        (["x", "--tool", "hammer"], "'hammer' is not one of"),
        (["x", "--tool-choice", "required"], "needs a --tool"),
        (["x", "--tool", "bash", "--tool-choice", "python"], "--tool-choice is 'python'"),
        (["x", "--session", "ses_1", "--system", "y"], "--system says what a new session is made of"),
        (["x", "--session", "ses_1", "--tool", "bash"], "--tool says what"),
        (["x", "--approve", "ask"], "--approve ask needs a terminal"),
        (["x", "--rounds", "-1"], "--rounds"),
        (["x", "--file", "/nowhere"], "does not exist"),
        (["x", "--file", sys.executable], "tenuto files put"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_before_a_session_is_made(argv: list[str], said: str) -> None:
    done = CliRunner(env={"TENUTO_API_URL": "http://127.0.0.1:1", "TENUTO_API_KEY": "k"}).invoke(main, ["run", *argv])
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.output
