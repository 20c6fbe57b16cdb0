"""Which outputs give way, and where the transcript is cut."""

import pytest

from runtime.steps.compacting import dropped, is_full, joined, last_round, reserve, warning
from runtime.steps.measuring import Measure
from workflows.contract import Progress

THOUSAND = Measure(1000)
CONFIG = {"context_policy": "drop_tool_output", "limits": {"max_think_tokens": 100}}


def branch(*sizes: tuple[str, int]):
    return [(no, kind, list(range(no * 1000, no * 1000 + size))) for no, (kind, size) in enumerate(sizes, 1)]


TALK = branch(("message", 10), ("tool", 100), ("model", 10), ("tool", 100), ("model", 10), ("tool", 100), ("model", 5))


def short(calls: int) -> list[int]:
    return [-1] * calls


def tokens(compacted, before):
    whole = [t for _, _, ids in before for t in ids]
    return [*whole[: compacted.start], *(t for s in compacted.segments for t in s.token_ids)]


@pytest.mark.parametrize(("goal", "start", "count", "left"), [(250, 120, 1, 236), (140, 10, 2, 137), (1, 10, 2, 137)])
def test_the_latest_outputs_that_suffice_give_way_and_never_the_last(goal, start, count, left):
    compacted = dropped(TALK, goal, short, {})
    assert (compacted.start, compacted.dropped, compacted.tokens) == (start, count, left)
    after = tokens(compacted, TALK)
    assert len(after) == left
    assert after[:start] == [t for _, _, ids in TALK for t in ids][:start]
    assert after[-105:] == [*TALK[5][2], *TALK[6][2]]


def test_outputs_of_several_calls_are_stood_for_one_by_one():
    compacted = dropped(TALK, 250, short, {4: 3})
    assert compacted.segments[0].token_ids == [-1] * 3


def test_without_an_output_that_would_become_shorter_there_is_nothing_to_drop():
    assert dropped(branch(("message", 500), ("tool", 100)), 10, short, {}) is None
    assert dropped(branch(("tool", 1), ("model", 9), ("tool", 100)), 5, short, {}) is None


def test_a_turn_that_is_too_long_is_kept_as_its_beginning_and_its_last_round():
    turn = [(1, "message", [1]), (2, "scaffold", [2]), (2, "model", [3]), (2, "scaffold", [4]), (3, "tool", [5])]
    turn += [(4, "scaffold", [6]), (4, "model", [7]), (4, "model", [8]), (4, "scaffold", [9]), (5, "tool", [10])]
    assert [ids[0] for _, _, ids in last_round(turn)] == [1, 6, 7, 8, 9, 10]
    assert last_round(turn[:1]) == turn[:1]
    assert [(s.kind, list(s.token_ids)) for s in joined(turn[5:])] == [
        ("scaffold", [6]),
        ("model", [7, 8]),
        ("scaffold", [9]),
        ("tool", [10]),
    ]


def test_a_context_is_full_when_the_next_think_would_not_find_its_room():
    at = Progress(kind="tool")
    limit = 1000 - reserve(100, THOUSAND)
    assert not is_full(THOUSAND, CONFIG, limit, at)
    assert is_full(THOUSAND, CONFIG, limit + 1, at)
    assert not is_full(THOUSAND, {**CONFIG, "context_policy": "fail"}, 999, at)
    assert not is_full(THOUSAND, CONFIG, 999, Progress(kind="tool", compacted=True)), "never twice in a row"
    rests = Progress(kind="think", outcome="final")
    assert not is_full(THOUSAND, CONFIG, 999, rests), "a session at rest needs no room"


def test_the_warning_comes_once_with_the_step_that_passes_the_mark():
    assert [len(warning(THOUSAND, a, b)) for a, b in ((0, 799), (799, 800), (800, 900), (300, 850))] == [0, 1, 0, 1]
