"""The price file: what is wrong in it is named, and what is not known costs nobody knows what."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StartupError
from runtime.prices import Prices, load

USED = {
    "sampled_tokens": 2_000_000,
    "prefilled_tokens": 500_000,
    "cached_tokens": 1_000_000,
    "engine_s": 1800.0,
    "sandbox_s": 7200.0,
    "host_byte_hours": 3.0 * 2**30,
    "nvme_byte_hours": 0.0,
    "shared_byte_hours": None,
}


def test_what_was_used_is_priced_by_model() -> None:
    prices = Prices.model_validate(
        {
            "currency": "EUR",
            "sampled_per_million": 1.5,
            "engine_hour": "0.10",
            "host_gib_hour": 0.01,
            "models": {"big": {"sampled_per_million": 4, "cached_per_million": 0.5}},
        }
    )
    assert prices.cost("small", USED) == Decimal("3.08")
    assert prices.cost("big", USED) == Decimal("8.58")
    assert prices.cost("small", {**USED, "engine_s": None}) is None
    assert prices.cost("small", {**USED, "cached_tokens": None}) == Decimal("3.08")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "the file: "),
        ("{}", "currency: Field required"),
        ('{"currency": "EUR", "sampled_per_milion": 1}', "sampled_per_milion: Extra inputs"),
        ('{"currency": "EUR", "sandbox_hour": -1}', "sandbox_hour: "),
        ('{"currency": "EUR", "sandbox_hour": NaN}', "sandbox_hour: "),
        ('{"currency": "EUR", "models": {"m": {"coins": 1}}}', "coins: Extra inputs"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff", "is not JSON"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: Any, said: str) -> None:
    path = tmp_path / "prices.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartupError) as refused:
        load(path)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_a_file_that_is_not_there_is_refused_by_name_and_none_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no-such"):
        load(tmp_path / "no-such")
    assert load(None) is None
    good = tmp_path / "prices.json"
    good.write_text(json.dumps({"currency": "EUR"}))
    assert load(good) == Prices(currency="EUR")
