"""The tier policy against published rules and an oracle, in simulated time.

    python -m bench.policy --seeds 20 --evidence DIR

Three mixes of tool durations, live sets of 0.9, 1.8 and 3.7 times what the tiers hold, two hundred sessions, twelve
policies under the same seeds, and the recorded chat traffic. Cost is the mean first-token time, stalls included; gain
is (no tier - policy) / (no tier - oracle), the oracle being the better of two rules that know every return. Shares are
of the seeds that were held out while the policy was made. `--sabotage` spoils ours: `price` turns the sign of the
price, `survival` ignores how long a pause has lasted.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from bench.policy_load import MIXES, conversations
from bench.policy_plot import plot
from bench.policy_run import DEMAND, ORACLES, OURS, POLICIES, RATIOS, RIVALS, SABOTAGE, Length, chat, simulate

TUNED_ON = range(10)
"""Seeds that were looked at while the policy was made; the others are held out."""
PRESSED = 1.8
"""The least ratio at which the tiers are under pressure: shares are of these."""
BAR_SHARE = 0.95
BAR_VS_NO_TIER = 1.0
BAR_BEHIND_INFORMED = 0.03
"""What learning may cost: shares lost against the same rule that knows the true distributions."""
Cell = tuple[str, float]


@click.command()
@click.option("--seeds", type=int, default=20, show_default=True)
@click.option("--first-seed", type=int, default=0, show_default=True)
@click.option("--measure", type=int, default=240, show_default=True, help="First tokens measured in each run.")
@click.option("--demand", type=float, default=DEMAND, show_default=True, help="Load without tiers; 0: the real speed.")
@click.option("--chat", "recording", type=click.Path(exists=True, path_type=Path), help="Recorded chat traffic too.")
@click.option("--evidence", type=click.Path(path_type=Path), help="Leave the lines and a plot in this directory.")
@click.option("--sabotage", type=click.Choice(sorted(SABOTAGE)), help="Spoil our policy on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    seeds: int,
    first_seed: int,
    measure: int,
    demand: float,
    recording: Path | None,
    evidence: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Our rule, the published ones, and one that knows the future."""
    length = Length(warm=measure // 2, measure=measure)
    found = run(range(first_seed, first_seed + seeds), length, demand, sabotage)
    arrivals = conversations(recording) if recording is not None else []
    talk = (chat(arrivals, name, ratio, DEMAND, sabotage) for ratio in RATIOS for name in _chatting() if arrivals)
    lines = list(_told(itertools.chain(found, talk)))
    figure = figures(lines)
    if evidence is not None:
        evidence.mkdir(parents=True, exist_ok=True)
        (evidence / "policy.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        (evidence / "policy.svg").write_text(plot(gains(lines)))
    click.echo(table(lines))
    for bar in missed(figure):
        click.echo(f"missed: {bar}")
    if as_json:
        click.echo(json.dumps(figure))
    sys.exit(0 if is_green(figure) else 1)


def run(seeds: range, length: Length, demand: float = DEMAND, sabotage: str | None = None) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        for mix in MIXES:
            for ratio in RATIOS:
                for name in POLICIES:
                    yield simulate(name, mix, ratio, seed, length, demand, sabotage)


def _chatting() -> list[str]:
    """Nobody knows the true distribution of recorded gaps."""
    return [name for name in POLICIES if name != "informed"]


def _told(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line["policy"] == POLICIES[-1]:
            click.echo(f"seed {line['seed']}: {line['mix']} at {line['ratio']}", err=True)
        yield line


def costs(
    lines: list[dict[str, Any]], wanted: Callable[[int], bool] = lambda seed: True
) -> dict[Cell, dict[str, float]]:
    """Mean first-token time in seconds, over all first tokens of the wanted seeds: {(mix, ratio): {policy: s}}."""
    waited: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for line in lines:
        if wanted(line["seed"]):
            total = waited[line["mix"], line["ratio"]][line["policy"]]
            total[0] += line["waited_s"]
            total[1] += line["firsts"]
    return {cell: {name: s / n for name, (s, n) in of.items()} for cell, of in waited.items()}


def gains(
    lines: list[dict[str, Any]], wanted: Callable[[int], bool] = lambda seed: True
) -> dict[Cell, dict[str, float]]:
    """Each policy's part of what the oracle gains over no tier."""
    found = {}
    for cell, cost in costs(lines, wanted).items():
        whole = cost["none"] - min(cost[name] for name in ORACLES)
        found[cell] = {name: (cost["none"] - value) / whole for name, value in cost.items()}
    return found


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, recomputed from the lines alone.

    `oracle_share`, `best_rival_share`: in the worst cell (mix and ratio) for ours, and for the best rival in that
    cell. `least_lead`: ours less the best rival's share, in the cell where that is least.
    `informed_share`: in the worst cell, of the same rule with the true distributions given; `behind_informed`: the
    most that ours is behind it in any cell.
    """
    held_out = {line["seed"] for line in lines if line["mix"] != "chat"} - set(TUNED_ON)
    of_mixes = [line for line in lines if line["mix"] != "chat"]
    share = gains(of_mixes, lambda seed: seed in held_out or not held_out)
    pressed = {cell: of for cell, of in share.items() if cell[1] >= PRESSED}
    worst = min(pressed, key=lambda cell: pressed[cell][OURS])
    best = max(RIVALS, key=lambda name: pressed[worst][name])
    everything = costs(lines)
    on_chat = {str(cell[1]): round(of[OURS], 3) for cell, of in gains(lines).items() if cell[0] == "chat"}
    return {
        "oracle_share": round(pressed[worst][OURS], 4),
        "worst_vs_no_tier": round(max(of[OURS] / of["none"] for of in everything.values()), 4),
        "best_rival": best,
        "best_rival_share": round(pressed[worst][best], 4),
        "worst_mix": worst[0],
        "worst_ratio": worst[1],
        "informed_share": round(pressed[worst]["informed"], 4),
        "behind_informed": round(max(of["informed"] - of[OURS] for of in pressed.values()), 4),
        "least_lead": round(min(of[OURS] - max(of[name] for name in RIVALS) for of in pressed.values()), 4),
        "chat_share": on_chat,
        "seeds_held_out": len(held_out),
    }


def missed(figure: dict[str, Any]) -> list[str]:
    """The bars that are not reached, each in a sentence."""
    found = []
    if figure["oracle_share"] < BAR_SHARE:
        found.append(f"ours keeps {figure['oracle_share']:.1%} of the oracle's gain, {BAR_SHARE:.0%} is wanted")
    if figure["least_lead"] <= 0:
        found.append(f"a published rule is ahead of ours by {-figure['least_lead']:.1%} of the oracle's gain")
    if figure["worst_vs_no_tier"] > BAR_VS_NO_TIER:
        found.append(f"ours waits {figure['worst_vs_no_tier']:.2f} times as long as no tier")
    if figure["behind_informed"] > BAR_BEHIND_INFORMED:
        found.append(f"ours is {figure['behind_informed']:.1%} behind the same rule with known distributions")
    return found


def is_green(figure: dict[str, Any]) -> bool:
    return not missed(figure)


def table(lines: list[dict[str, Any]]) -> str:
    """For people: seconds to the first token, and the part of the oracle's gain, of all seeds."""
    cost, share = costs(lines), gains(lines)
    rows = ["mix    ratio  " + "".join(f"{name[:16]:>18}" for name in POLICIES)]
    for cell in cost:
        parts = (f"{cost[cell][n]:9.3f} s {share[cell][n]:6.1%}" if n in cost[cell] else "" for n in POLICIES)
        rows.append(f"{cell[0]:<6} {cell[1]:<6} " + "".join(f"{part:>18}" for part in parts))
    return "\n".join(rows)


def deviations(measured: list[tuple[str, float]], simulated: list[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """The simulator checked against a real run: (event, measured s, simulated s) of every event that both have.

    Events are named as in `Outcome.events`: session, turn, and when its first token came, in seconds from the start.
    Raises ValueError where an event was measured that was not simulated.
    """
    expected = dict(simulated)
    strange = [event for event, _ in measured if event not in expected]
    if strange:
        raise ValueError(f"not simulated: {', '.join(strange)}")
    return [(event, at_s, expected[event]) for event, at_s in measured]


if __name__ == "__main__":
    main()
