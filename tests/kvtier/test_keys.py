from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import TierUsageError, next_key, page_keys, root_key
from kvtier.keys import framed_digest, page_digest

ROOT = root_key(fingerprint=b"f", group=0, shard=0, shards=1, salt=b"s")


def test_every_field_of_a_root_changes_it() -> None:
    roots = {
        root_key(fingerprint=b"f", group=0, shard=0, shards=2, salt=b"s"),
        root_key(fingerprint=b"g", group=0, shard=0, shards=2, salt=b"s"),
        root_key(fingerprint=b"f", group=1, shard=0, shards=2, salt=b"s"),
        root_key(fingerprint=b"f", group=0, shard=1, shards=2, salt=b"s"),
        root_key(fingerprint=b"f", group=0, shard=0, shards=3, salt=b"s"),
        root_key(fingerprint=b"f", group=0, shard=0, shards=2, salt=b"t"),
    }
    assert len(roots) == 6
    assert all(len(root) == 32 for root in roots)


def test_bytes_that_move_from_one_field_to_the_next_give_another_key() -> None:
    one = root_key(fingerprint=b"ab", group=0, shard=0, shards=1, salt=b"c")
    other = root_key(fingerprint=b"a", group=0, shard=0, shards=1, salt=b"bc")
    assert one != other
    assert framed_digest(b"x", b"", b"y") != framed_digest(b"x", b"y", b"")
    assert framed_digest(b"xy") != framed_digest(b"x", b"y")


def test_a_payload_digest_depends_on_key_and_tenant() -> None:
    digests = {
        page_digest(ROOT, b"a", b"p"),
        page_digest(ROOT, b"b", b"p"),
        page_digest(ROOT[::-1], b"a", b"p"),
    }
    assert len(digests) == 3


def test_a_payload_digest_depends_on_every_bit_and_on_where_each_field_ends() -> None:
    page = bytes(4096)
    flipped = [page[:at] + b"\x01" + page[at + 1 :] for at in (0, 1, 2047, 4095)]
    assert len({page_digest(ROOT, b"a", one) for one in (page, *flipped, page[:-1], page + b"\0")}) == 7
    assert page_digest(ROOT, b"ab", b"c") != page_digest(ROOT, b"a", b"bc")


def test_the_payload_digest_is_the_one_that_is_on_disks_already() -> None:
    assert page_digest(ROOT, b"salt", bytes(range(256))).hex() == "6ee9aaa3dab25983c98f58c07258b9bf"


def test_keys_are_the_same_in_a_process_with_another_hash_seed() -> None:
    program = (
        "from kvtier import root_key, page_keys;"
        "r = root_key(fingerprint=b'f', group=0, shard=0, shards=1, salt=b's');"
        "print(page_keys(r, range(10), 4)[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {page_keys(ROOT, list(range(10)), 4)[-1].hex()}


def test_the_key_format_is_the_one_that_is_on_disks_already() -> None:
    assert ROOT.hex() == "995d9bf1b27bd8ed2c1c1c854a024c8a4618fc64edffdd200a30e44359c08605"
    assert next_key(ROOT, [1, 2, 3]).hex() == "5934804f6ca76521f5a7a931ee4c7c18830a08c57b249c654f8ce634f26ca54f"


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
)
def test_two_prefixes_share_keys_exactly_as_far_as_they_share_whole_pages(one: list[int], two: list[int]) -> None:
    first, second = page_keys(ROOT, one, 8), page_keys(ROOT, two, 8)
    for page, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == (one[: 8 * page + 8] == two[: 8 * page + 8])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.integers(1, 9))
def test_a_chain_is_its_keys_made_one_by_one(tokens: list[int], size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(tokens), size):
        parent = next_key(parent, tokens[start : start + size])
        expected.append(parent)
    assert page_keys(ROOT, tokens, size) == expected


def test_a_partial_page_has_another_key_than_the_page_it_becomes() -> None:
    assert page_keys(ROOT, [1, 2, 3], 4)[0] != page_keys(ROOT, [1, 2, 3, 4], 4)[0]


def test_no_tokens_make_no_keys() -> None:
    assert page_keys(ROOT, [], 16) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: next_key(b"short", [1]), "32 bytes"),
        (lambda: next_key(ROOT, []), "without tokens"),
        (lambda: next_key(ROOT, [-1]), "token ids"),
        (lambda: next_key(ROOT, [2**32]), "token ids"),
        (lambda: page_keys(ROOT, [1], 0), "page_size"),
        (lambda: root_key(fingerprint=b"f", group=0, shard=1, shards=1, salt=b""), "shard 1 of 1"),
        (lambda: root_key(fingerprint=b"f", group=-1, shard=0, shards=1, salt=b""), "group"),
    ],
)
def test_a_key_that_cannot_be_is_refused_in_a_sentence(wrong: object, sentence: str) -> None:
    assert callable(wrong)
    with pytest.raises(TierUsageError, match=sentence):
        wrong()
