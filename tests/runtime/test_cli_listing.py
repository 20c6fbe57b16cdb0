"""Tables on a terminal: what can be copied from them is whole."""

from __future__ import annotations

import sys

import click
import pytest

from runtime.cli_listing import show

ROW = {"id": "ses_0123456789abcdef01234567", "node": "node-1", "about": "many words " * 12}


def test_a_narrow_terminal_cuts_no_id(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show([ROW], False, ["session", "node", "about"], lambda row: [row["id"], row["node"], row["about"]])
    printed = click.unstyle(capsys.readouterr().out)
    assert f"{ROW['id']}  {ROW['node']}" in printed
    assert printed.count("many words") == 12
    assert max(map(len, printed.splitlines())) < 80


def test_what_looks_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW], False, ["name"], lambda row: ["[red]x[/foo]"])
    assert "[red]x[/foo]" in capsys.readouterr().out
