from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.agent.mask import Mask

LETTERS = st.text("abc", min_size=4, max_size=8)


def masked(secrets: list[str], *pieces: bytes) -> bytes:
    mask = Mask(secrets)
    return b"".join([*(mask.read(piece) for piece in pieces), mask.rest()])


@given(st.lists(LETTERS, min_size=1, max_size=4), st.text("abc", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_where_the_pieces_are_cut_makes_no_difference_and_no_secret_is_left(
    secrets: list[str], text: str, cuts: list[int]
) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    found = masked(secrets, *pieces)
    assert found == masked(secrets, data)
    assert not any(secret.encode() in found for secret in secrets)


def test_what_cannot_be_the_beginning_of_a_secret_is_passed_on_at_once() -> None:
    mask = Mask(["secret"])
    assert mask.read(b"prompt> ") == b"prompt> "
    assert mask.read(b"it is sec") == b"it is "
    assert mask.read(b"ond") == b"second"
    assert mask.read(b"secret") == b"***"
    assert mask.rest() == b""


def test_the_longer_of_two_secrets_is_masked_whole() -> None:
    assert masked(["abcd", "abcdef"], b"abcd", b"ef abcd") == b"*** ***"


@pytest.mark.parametrize("before", ["", "u", "us", "use", "user:"])
def test_a_secret_is_masked_in_base64_wherever_it_is_in_the_text(before: str) -> None:
    secret = "p4ss>>word??~~"
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(f"{before}{secret}:more".encode())
        found = masked([secret], text)
        assert b"***" in found
        assert len(found) <= len(text) - len(secret) + 3
    assert b"cDRzcz" not in masked([secret], base64.b64encode(secret.encode()))


def test_a_secret_of_several_lines_is_masked_as_a_terminal_prints_it() -> None:
    assert masked(["-----BEGIN\nkey\n-----END\n"], b"-----BEGIN\r\nkey\r\n-----END\r\n") == b"***\r\n"


def test_a_secret_that_is_all_a_stream_says_is_never_shown_byte_by_byte() -> None:
    secret = "s3cr3t-value"
    assert masked([secret], *(bytes([byte]) for byte in secret.encode() * 3)) == b"***" * 3
