"""How much prefill comes beside decoding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.pace import LEAST, REFRESH_EVERY, Pace

DECODE_S = 0.010


def settled(token_s: float, decoding: int = 8, steps: int = 60) -> tuple[Pace, int]:
    """A pace after steps of a machine that takes these times, and what it then gives."""
    pace = Pace(first=16, most=256, stretch=0.75)
    pace.observe(decoding, 0, DECODE_S)
    for _ in range(steps):
        step(pace, token_s, decoding)
    return pace, share(pace, token_s, decoding)


def step(pace: Pace, token_s: float, decoding: int = 8, decode_s: float = DECODE_S) -> int:
    tokens = pace.tokens(decoding)
    pace.observe(decoding, tokens, decode_s + tokens * token_s)
    return tokens


def share(pace: Pace, token_s: float, decoding: int = 8) -> int:
    """What it gives in a step that carries prefill."""
    return step(pace, token_s, decoding) or step(pace, token_s, decoding)


def test_nobody_decodes_and_the_prompt_has_the_step_to_itself() -> None:
    assert Pace(16, 256, 0.75).tokens(0) == 256


def test_while_nothing_is_known_the_first_figure_holds() -> None:
    pace = Pace(16, 256, 0.75)
    assert pace.tokens(4) == 16
    pace.observe(4, 0, DECODE_S)
    assert pace.tokens(4) == 16


@given(st.floats(0.00005, 0.002))
def test_a_step_is_stretched_by_no_more_than_was_allowed(token_s: float) -> None:
    _, tokens = settled(token_s)
    assert tokens == LEAST or DECODE_S + tokens * token_s <= DECODE_S * 1.75 * 1.001
    assert tokens in (LEAST, 256) or DECODE_S + (tokens + 1) * token_s > DECODE_S * 1.75 * 0.999


def test_the_share_shrinks_as_the_context_grows() -> None:
    pace, before = settled(0.0005)
    for _ in range(30):
        step(pace, 0.0015)
    assert 0 < share(pace, 0.0015) < before


def test_a_prompt_always_gets_on() -> None:
    assert settled(10.0)[1] == LEAST


def test_a_machine_that_becomes_slower_in_both_keeps_the_share_and_does_not_starve_the_prompt() -> None:
    pace, before = settled(0.0005)
    for _ in range(20 * REFRESH_EVERY):
        step(pace, 0.0015, decode_s=3 * DECODE_S)
    assert abs(share(pace, 0.0015) - before) <= 1


def test_decoding_is_measured_again_every_so_often() -> None:
    pace, _ = settled(0.0005)
    given_ = [step(pace, 0.0005) for _ in range(3 * (REFRESH_EVERY + 1))]
    assert given_.count(0) == 3


def test_prefill_alone_teaches_what_a_token_costs() -> None:
    pace = Pace(16, 256, 0.75)
    pace.observe(0, 256, 0.256)
    pace.observe(8, 0, DECODE_S)
    assert pace.tokens(8) == 7


def test_a_batch_of_unknown_size_is_taken_for_its_neighbour() -> None:
    pace = Pace(16, 256, 0.75)
    pace.observe(0, 100, 0.1)
    pace.observe(2, 0, 0.008)
    pace.observe(16, 0, 0.016)
    assert (pace.tokens(3), pace.tokens(14)) == (6, 12)
