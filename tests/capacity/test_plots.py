"""The plots are whole documents that follow light and dark, for every model."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from engine.capacity import plots
from tests.capacity.support import NAMES, planned


@pytest.mark.parametrize("name", NAMES)
def test_three_plots_are_well_formed_and_within_their_frame(name: str) -> None:
    drawn = plots(planned(name))
    assert set(drawn) == {"roofline.svg", "users.svg", "break-even.svg"}
    for text in drawn.values():
        root = ET.fromstring(text)
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme: dark" in text
        assert "tabular-nums" in text
        assert "nan" not in text
        assert "inf" not in text.replace("info", "")
        for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert (0 <= x <= 640, 0 <= y <= 400) == (True, True), (name, point)


def test_names_from_a_config_are_escaped() -> None:
    ET.fromstring(plots(planned("llama-3-8b"))["users.svg"])
    from engine.capacity import Wish, make_plan, read_config
    from tests.capacity.support import config

    odd = make_plan(read_config(config("llama-3-8b"), "<script>&"), Wish())
    assert "<script>" not in plots(odd)["users.svg"]
