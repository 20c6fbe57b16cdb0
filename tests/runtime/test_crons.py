from __future__ import annotations

import re

import pytest

from runtime.crons import check_cron, check_time_zone


@pytest.mark.parametrize("text", ["0 9 * * mon-fri", "*/10 0-6,22 1,15 jan-mar 0-7", "5/15 * * * *", "@hourly"])
def test_an_expression_of_five_fields_is_taken(text: str) -> None:
    assert check_cron(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 fields; give five"),
        ("* * * *", "has 4 fields"),
        ("* * * * * *", "has 6 fields"),
        ("@reboot", "has 1 fields"),
        ("60 * * * *", "the minute '60' is not from 0 to 59"),
        ("* 24 * * *", "the hour '24'"),
        ("* * 0 * *", "the day of the month '0'"),
        ("* * * 13 *", "the month '13'"),
        ("* * * mon *", "the month 'mon'"),
        ("* * * * 8", "the day of the week '8'"),
        ("5-1 * * * *", "ends before it begins"),
        ("*/0 * * * *", "the step of the minute"),
        ("1,,2 * * * *", "cannot be read"),
        ("? * * * *", "cannot be read"),
        ("CRON_TZ=UTC 0 0 * * *", "has 6 fields"),
    ],
)
def test_what_is_wrong_with_an_expression_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        check_cron(text)


@pytest.mark.parametrize("name", ["", "Nowhere/City", "../../etc/passwd", "/etc/localtime", "UTC\0", "Europe/"])
def test_a_time_zone_that_is_not_known_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="is no time zone"):
        check_time_zone(name)
    assert check_time_zone("Europe/Berlin") == "Europe/Berlin"
