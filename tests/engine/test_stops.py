"""Texts that end a message: found wherever tokens are cut, and never shown, not by half."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.constraint import Constraints
from engine.errors import RequestError
from engine.tokens import StopText, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from tests.engine.tiny import write_tiny

    return load_tokenizer(write_tiny(tmp_path_factory.mktemp("stops") / "tiny.gguf"))


def shown(tokenizer: Tokenizer, stops: list[str], text: str, cuts: int = 1) -> tuple[str, str | None]:
    watch = StopText(tokenizer, stops)
    ids = tokenizer.encode(text)
    told = "".join(watch.push(ids[at : at + cuts]) for at in range(0, len(ids), cuts))
    return told + watch.finish(), watch.found


@pytest.mark.parametrize("cuts", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "text", "left", "found"),
    [
        (["STOP"], "one STOP two", "one ", "STOP"),
        (["STOP"], "one STO two", "one STO two", None),
        (["\n\n"], "a\n\nb", "a", "\n\n"),
        (["abc", "b"], "xabc", "xa", "b"),
        (["bc", "abc"], "xabc", "x", "abc"),
        (["aab"], "aaab", "a", "aab"),
        (["né", "🙂!"], "ne 🙂!", "ne ", "🙂!"),
        (["hello"], "hello", "", "hello"),
        ([], "hello", "hello", None),
        (["a" * 100], "a" * 99, "a" * 99, None),
    ],
)
def test_a_stop_text_is_found_wherever_its_tokens_are_cut(
    tokenizer: Tokenizer, cuts: int, stops: list[str], text: str, left: str, found: str | None
) -> None:
    assert shown(tokenizer, stops, text, cuts) == (left, found)


def test_nothing_is_shown_that_a_stop_text_takes_back(tokenizer: Tokenizer) -> None:
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choice("abé🙂") for _ in range(24))
        stops = ["".join(draw.choice("abé🙂") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        whole, found = shown(tokenizer, stops, text)
        watch, told = StopText(tokenizer, stops), ""
        for token in tokenizer.encode(text):
            told += watch.push([token])
            assert whole.startswith(told)
            assert "\ufffd" not in told
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        assert found == (min(ends)[2] if ends else None)


def test_a_replay_that_holds_a_stop_text_has_ended_and_is_refused(tmp_path: Path) -> None:
    from tests.engine.tiny import write_tiny

    path = write_tiny(tmp_path / "tiny.gguf")
    constraints = Constraints(path, 265)
    ids = load_tokenizer(path).encode("so. END of it")
    with pytest.raises(RequestError, match="END"):
        constraints.stop_text(["END"], ids)
    watch = constraints.stop_text(["END of it all"], ids)
    assert watch.push(load_tokenizer(path).encode(" all")) == ""
    assert watch.found == "END of it all"
