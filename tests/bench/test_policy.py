"""The simulation of tiers, in its short form."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bench import policy_rivals as rivals
from bench.policy import main
from bench.policy_bound import bound
from bench.policy_figures import costs, counted, figures, gains, is_green, missed, thrash
from bench.policy_halved import halved
from bench.policy_load import MIXES, Turn, conversations, shapes
from bench.policy_machine import Hardware
from bench.policy_plot import plot
from bench.policy_run import OUR_ORDER, OURS, POLICIES, RIVALS, Length, chat, make, population, prepared, simulate
from bench.policy_sim import Simulation
from bench.verify import BENCHES
from kvtier.policy import Expected, Move, Policy, Reason, State, TierKeep, View

SHORT = Length(60, 120)


@pytest.mark.parametrize(
    ("mix", "p50", "p90", "p99"),
    [("short", 1.0, 3.0, 10.0), ("mixed", 5.0, 60.0, 600.0), ("human", 600.0, 5500.0, 22000.0)],
)
def test_the_mixes_are_the_published_ones(mix, p50, p90, p99):
    rng = random.Random(3)
    tools = rng.choices(MIXES[mix], [tool.weight for tool in MIXES[mix]], k=20_000)
    cuts = statistics.quantiles((tool.draw(rng) for tool in tools), n=100)
    assert (cuts[49], cuts[89], cuts[98]) == (
        pytest.approx(p50, rel=0.3),
        pytest.approx(p90, rel=0.3),
        pytest.approx(p99, rel=0.3),
    )


def test_the_recorded_shapes_are_there_and_hold_numbers_only():
    assert len(shapes()) == 8
    assert all(prompt > 0 and all(out >= 0 and result > 0 for out, result in turns) for prompt, turns in shapes())


def one_after_another(machine: Hardware, policy: Policy) -> list[tuple[str, float]]:
    """Two sessions that share a device which holds one, so that each comes back to nothing of its own there."""
    simulation = Simulation(machine, policy, rivals.first_come)
    for k in range(2):
        turns = [Turn(1000, 10, "sh", 20.0, 60.0, State.TOOL) for _ in range(3)]
        simulation.begin([*turns, Turn(10, 10, "", 0.0, None, State.RUNNING, last=True)], at_s=5.0 * k)
    return simulation.run().events


def machine(**changes: float) -> Hardware:
    size = 5000 * 23_040
    return dataclasses.replace(Hardware(size, 0, 4 * size), **changes)


@pytest.mark.parametrize("rate", ["nvme_read_bps", "decode_tps"])
def test_halving_a_rate_changes_the_answer(rate):
    policy = Policy(rivals.Lru(), careful=False, demotes=True, pieces=1)
    tight = machine(device_bytes=3200 * 23_040)
    slow = dataclasses.replace(tight, **{rate: getattr(tight, rate) / 2})
    before, after = one_after_another(tight, policy), one_after_another(slow, policy)
    assert [name for name, _ in before] == [name for name, _ in after]
    assert after[-1][1] > before[-1][1]


def test_a_first_token_comes_when_prefill_and_decoding_say():
    events = dict(one_after_another(machine(), Policy(rivals.Lru())))
    prefill = Hardware().prefill
    assert events["s1/0"] == pytest.approx(prefill.seconds(1000))
    assert events["s1/1"] == pytest.approx(events["s1/0"] + 10 / 717 + 20.0 + prefill.seconds(2010, 1010), abs=0.1)


def test_a_tier_slower_than_recomputing_is_left_alone_and_costs_nothing():
    slow = dataclasses.replace(Hardware(), host_bps=1e6, nvme_read_bps=1e6, nvme_write_bps=1e6)
    waits = {}
    for name, tier_bytes in (("with", 4e9), ("without", 0.0)):
        simulation = Simulation(
            slow.sized(2e9, tier_bytes), Policy(TierKeep(Expected())), rivals.first_come, warm=50, measure=100
        )
        for turns, index, left, following in population(1, "human"):
            simulation.begin_paused(turns, index, left, following)
        for name_, session in simulation.sessions.items():
            if session.copy is not None:
                simulation.sessions[name_] = dataclasses.replace(session, copy=None, copy_from=0, copy_to=0)
        simulation.used = {place: used if place == "device" else 0 for place, used in simulation.used.items()}
        outcome = simulation.run()
        waits[name] = outcome.mean_wait_s
        assert outcome.stored_bytes == outcome.restored_bytes == 0
    assert waits["with"] == pytest.approx(waits["without"])


@pytest.fixture(scope="module")
def lines():
    return [simulate(name, "human", 3.7, 10, SHORT, 0.5) for name in POLICIES if name != "infinite"]


def test_ours_is_ahead_of_every_published_rule_and_of_no_tier_under_pressure(lines):
    figure = figures(lines)
    assert figure["least_lead"] > 0
    assert figure["worst_vs_no_tier"] < 1
    assert 0.8 < figure["oracle_share"] < 1.05
    assert (figure["worst_mix"], figure["worst_ratio"]) == ("human", 3.7)


def test_the_figures_follow_from_the_lines_alone_and_no_seed_differs_between_runs(lines):
    again = simulate(OURS, "human", 3.7, 10, SHORT, 0.5)
    assert again == next(line for line in lines if line["policy"] == OURS)
    assert figures(json.loads(json.dumps(lines))) == figures(lines)


def test_no_rule_is_ahead_of_the_bound_of_an_infinite_device(lines):
    bound = simulate("infinite", "human", 3.7, 10, SHORT, 0.5)
    [of] = costs([*lines, bound]).values()
    assert of["infinite"] == min(of.values())


def test_an_inverted_price_turns_the_figure_red(lines):
    spoilt = [simulate(OURS, "human", 3.7, 10, SHORT, 0.5, "price") if x["policy"] == OURS else x for x in lines]
    assert figures(spoilt)["least_lead"] < 0
    assert any("published rule" in bar for bar in missed(figures(spoilt)))
    assert not is_green(figures(spoilt))


def test_ignoring_survival_loses_part_of_the_gain(lines):
    spoilt = simulate(OURS, "human", 3.7, 10, Length(100, 200), 0.5, "survival")
    whole = simulate(OURS, "human", 3.7, 10, Length(100, 200), 0.5)
    assert spoilt["waited_s"] > whole["waited_s"]


def test_lines_that_reach_every_bar_are_green():
    waited = dict.fromkeys(POLICIES, 6.0) | {
        "none": 10.0,
        "oracle": 2.0,
        "oracle-farthest": 2.1,
        OURS: 2.1,
        "informed": 2.1,
    }
    lines = [
        {"policy": name, "mix": "mixed", "ratio": 1.8, "seed": 11, "waited_s": waited[name], "firsts": 1}
        for name in waited
    ]
    assert is_green(figures(lines))
    lines[list(waited).index(OURS)]["waited_s"] = 10.5
    assert len(missed(figures(lines))) == 4


def test_a_session_that_is_at_hand_is_served_before_one_that_has_to_be_computed_again():
    turns = [Turn(4000, 10, "sh", 1e9, 1e10, State.TOOL), Turn(10, 10, "", 0.0, None, State.RUNNING, last=True)]
    simulation = Simulation(machine(device_bytes=20_000 * 23_040), Policy(TierKeep(Expected())), rivals.least_left)
    for at_s, new_tokens in ((0.0, 500), (0.1, 4000), (0.2, 100)):
        simulation.begin([dataclasses.replace(turns[0], new_tokens=new_tokens), turns[1]], at_s)
    firsts = [name for name, _ in simulation.run().events[:3]]
    assert firsts == ["s1/0", "s3/0", "s2/0"]


def test_room_is_there_when_what_lay_in_it_is_written():
    slow = machine(device_bytes=3200 * 23_040, nvme_write_bps=100 * 23_040, nvme_tax=0.0)
    simulation = Simulation(slow, Policy(rivals.Lru(), careful=False), rivals.first_come)
    last = Turn(10, 10, "", 0.0, None, State.RUNNING, last=True)
    simulation.begin([Turn(1000, 10, "sh", 100.0, 1e3, State.TOOL), last], at_s=0.0)
    simulation.begin([dataclasses.replace(last, new_tokens=3000)], at_s=2.0)
    first, second, *_ = simulation.run().events
    written_s = first[1] + 10 / slow.decode_tps + slow.nvme_latency_s + 1010 / 100
    assert second == ("s2/0", pytest.approx(written_s + slow.prefill.seconds(3000)))


class Watched(Policy):
    """Notes why it promoted what."""

    promoted: list[tuple[Reason, bool]]

    def decide(self, view: View) -> list[Move]:
        moves = super().decide(view)
        self.promoted += [(view.reason, move.session == view.subject) for move in moves if move.kind == "prefetch"]
        return moves


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_ours_promotes_only_what_is_about_to_be_served(mix):
    simulation, _ = prepared(OURS, mix, 3.7, 10, Length(20, 60), 0.5)
    simulation.policy = watched = Watched(TierKeep(Expected()))
    watched.promoted = []
    outcome = simulation.run()
    assert outcome.promoted_bytes > 0
    assert set(watched.promoted) == {(Reason.SCHEDULED, True)}
    assert outcome.thrash == 0


def test_what_our_order_brings_to_others_is_told_apart(lines):
    told = figures([*lines, simulate("lru" + OUR_ORDER, "human", 3.7, 10, SHORT, 0.5)])
    assert told["best_rival_share"] < told["best_rival_in_our_order"] < told["oracle_share"]
    assert 0 < told["same_order_share"] < told["oracle_share"]
    assert figures(lines)["best_rival_in_our_order"] is None


def test_the_seeds_that_were_tuned_on_do_not_count(lines):
    tuned = [{**line, "seed": 3, "waited_s": 9.0} for line in lines]
    assert figures([*lines, *tuned])["oracle_share"] == figures(lines)["oracle_share"]
    assert counted([*lines, *tuned]) == lines
    assert counted(tuned) == tuned


def test_what_is_promoted_and_leaves_unused_is_counted_and_turns_the_figure_red(lines):
    eager = simulate(OURS, "human", 3.7, 10, SHORT, 0.5, "promote")
    spoilt = [eager if line["policy"] == OURS else line for line in lines]
    assert thrash(lines)["human", 3.7][OURS] == 0 < thrash(spoilt)["human", 3.7][OURS] < 1
    assert any("promotes" in bar for bar in missed(figures(spoilt)))


def test_halving_every_bandwidth_changes_answers_unless_the_policy_is_deaf_to_them(lines):
    heard, deaf = (halved(10, Length(20, 40), sabotage) for sabotage in (None, "bandwidth"))
    assert heard["changed"] > 0.05 * heard["asked"]
    assert deaf["changed"] == 0
    assert not any("half the bandwidth" in bar for bar in missed(figures([*lines, heard])))
    assert any("half the bandwidth" in bar for bar in missed(figures([*lines, deaf])))


def test_the_relaxation_is_below_what_is_known_and_above_what_is_foreseen(lines):
    length = Length(40, 120)
    blind, seeing = (bound("human", 3.7, 10, length, 0.5, foresight) for foresight in (False, True))
    informed = simulate("informed", "human", 3.7, 10, length, 0.5)
    assert seeing["waited_s"] < blind["waited_s"] < informed["waited_s"]
    assert blind["firsts"] == informed["firsts"]
    figure = figures([*lines, blind, seeing])
    assert figure["bound_share"] is not None
    assert any("without foresight" in bar for bar in missed({**figure, "oracle_share": 0.9}))


@pytest.mark.soak
def test_the_quick_form_leaves_evidence_from_which_its_figures_follow(tmp_path):
    told = CliRunner().invoke(main, ["--quick", "--json", "--evidence", str(tmp_path)])
    figure = json.loads(told.output.splitlines()[-1])
    assert BENCHES["policy.jsonl"](tmp_path / "policy.jsonl")[0] == figure
    assert figure["thrash"] == 0
    assert figure["halved_changes"] > 0.05
    ElementTree.fromstring((tmp_path / "policy.svg").read_text())


def test_the_plot_names_every_policy_and_is_well_formed(lines):
    text = plot(gains(lines))
    ElementTree.fromstring(text)
    assert all(f">{name}<" in text for name in (OURS, *RIVALS))
    assert "prefers-color-scheme: dark" in text


def recording(path: Path) -> Path:
    """Three people who each ask five times, and one who asks once."""
    lines = []
    for turn in range(5):
        for person in range(3):
            ids = [100 * person + block for block in range(turn + 2)]
            at_ms = 60_000 * turn + 1000 * person
            lines.append({"timestamp": at_ms, "input_length": 512 * (turn + 1), "output_length": 60, "hash_ids": ids})
    lines.append({"timestamp": 300_000, "input_length": 900, "output_length": 20, "hash_ids": [7000, 7001]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_recorded_requests_become_the_conversations_that_they_were(tmp_path: Path) -> None:
    chains = conversations(recording(tmp_path / "chat.jsonl"))
    assert sorted(len(chain.turns) for chain in chains) == [2, 6, 6, 6]


def test_recorded_chat_is_served_to_its_last_request(tmp_path: Path) -> None:
    arrivals = conversations(recording(tmp_path / "chat.jsonl"))
    line = chat(arrivals, OURS, 1.8, 0.5, every=1)
    assert line["firsts"] == sum(len(chain.turns) - 1 for chain in arrivals)


def test_a_policy_is_made_by_its_name():
    assert isinstance(make("continuum", "mixed", {}).keep, rivals.Continuum)
    assert make("ours", "mixed", {}, "price").careful
