import inspect
import re
from pathlib import Path

import pytest

import workflows.states
from runtime.migrate import packaged_migrations
from workflows import TERMINAL, Event, IllegalTransition, State, moves, transition
from workflows.states import diagram

README = Path(__file__).parents[2] / "README.md"


def test_the_database_guards_the_same_moves_as_the_table():
    pairs: set[tuple[State, State]] = set()
    for migration in packaged_migrations():
        for block in re.findall(r"INSERT INTO session_transitions[^;]*;", migration.sql):
            pairs |= {(State(a), State(b)) for a, b in re.findall(r"\('(\w+)', '(\w+)'\)", block)}
    assert pairs == moves()


def test_an_illegal_move_is_refused_in_a_sentence_that_names_the_legal_ones():
    with pytest.raises(IllegalTransition, match="a session that is idle cannot run_tool; it can cancel, complete"):
        transition(State.IDLE, Event.RUN_TOOL)


def test_the_readme_shows_the_diagram_of_this_table():
    shown = re.search(r"```mermaid\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == diagram(), "the table was changed: run `python -m workflows.diagram`"


def test_the_table_fits_one_screen_of_code():
    source = inspect.getsource(workflows.states)
    table = source[source.index("_TABLE") : source.index("TERMINAL =")]
    assert len(table.splitlines()) <= 25


def test_nothing_leaves_a_terminal_state():
    assert not [pair for pair in moves() if pair[0] in TERMINAL]


def test_every_state_that_is_not_terminal_can_be_cancelled_or_is_being_cancelled():
    for state in set(State) - TERMINAL - {State.CANCELLING}:
        assert transition(state, Event.CANCEL) is State.CANCELLING


def test_every_state_can_be_reached_from_created():
    seen, grown = {State.CREATED}, True
    while grown:
        new = {target for source, target in moves() if source in seen} - seen
        seen |= new
        grown = bool(new)
    assert seen == set(State)
