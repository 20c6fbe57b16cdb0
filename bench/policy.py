"""The tier policy against published rules and an oracle, in simulated time.

    python -m bench.policy --seeds 20 --evidence DIR

Three mixes of tool durations, live sets of 0.9, 1.8 and 3.7 times what the tiers hold, two hundred sessions, thirteen
policies under the same seeds, and the recorded chat traffic. Cost is the mean first-token time, stalls included; gain
is (no tier - policy) / (no tier - oracle), the oracle being the better of two rules that know every return. Shares are
of the seeds that were held out while the policy was made. For the worst cell a relaxation says how much of the oracle's
gain there is at all without foresight. `--sabotage` spoils ours: `price` turns the sign of the price, `survival`
ignores how long a pause has lasted, `bandwidth` goes by bandwidths that are no longer true, `promote` reads to the
device what nobody asked for.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.policy_bound import bound
from bench.policy_figures import counted, figures, gains, held_out, is_green, missed, table, worst_cell
from bench.policy_halved import halved
from bench.policy_load import MIXES, conversations
from bench.policy_plot import plot
from bench.policy_run import DEMAND, OUR_ORDER, POLICIES, RATIOS, RIVALS, SABOTAGE, Length, chat, simulate

QUICK = (range(10, 11), Length(warm=30, measure=60))


@click.command()
@click.option("--seeds", type=int, default=20, show_default=True)
@click.option("--first-seed", type=int, default=0, show_default=True)
@click.option("--measure", type=int, default=240, show_default=True, help="First tokens measured in each run.")
@click.option("--demand", type=float, default=DEMAND, show_default=True, help="Load without tiers; 0: the real speed.")
@click.option("--chat", "recording", type=click.Path(exists=True, path_type=Path), help="Recorded chat traffic too.")
@click.option("--quick", is_flag=True, help="One seed that was held out, short runs, no bound: a quarter of a minute.")
@click.option("--evidence", type=click.Path(path_type=Path), help="Leave the lines and a plot in this directory.")
@click.option("--sabotage", type=click.Choice(sorted(SABOTAGE)), help="Spoil our policy on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    seeds: int,
    first_seed: int,
    measure: int,
    demand: float,
    recording: Path | None,
    quick: bool,
    evidence: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Our rule, the published ones, and one that knows the future."""
    asked = QUICK if quick else (range(first_seed, first_seed + seeds), Length(measure // 2, measure))
    found = run(*asked, demand, sabotage)
    arrivals = conversations(recording) if recording is not None else []
    talk = (chat(arrivals, name, ratio, DEMAND, sabotage) for ratio in RATIOS for name in _chatting() if arrivals)
    lines = list(_told(itertools.chain(found, talk)))
    if not quick:
        lines += limits(lines, asked[1], demand)
    figure = figures(lines)
    if evidence is not None:
        leave_evidence(evidence, lines)
    click.echo(table(lines))
    for bar in missed(figure):
        click.echo(f"missed: {bar}")
    if as_json:
        click.echo(json.dumps(figure))
    sys.exit(0 if is_green(figure) else 1)


def run(seeds: range, length: Length, demand: float = DEMAND, sabotage: str | None = None) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        yield halved(seed, length, sabotage)
        for mix, ratio, name in itertools.product(MIXES, RATIOS, POLICIES):
            yield simulate(name, mix, ratio, seed, length, demand, sabotage)


def limits(lines: list[dict[str, Any]], length: Length, demand: float) -> Iterator[dict[str, Any]]:
    """What can be had at all in the worst cell, on the seeds that count, and what our order brings to the others."""
    mix, ratio = worst_cell(lines)
    for seed, rival in itertools.product(sorted(held_out(lines)), RIVALS):
        yield simulate(rival + OUR_ORDER, mix, ratio, seed, length, demand)
    for seed, foresight in itertools.product(sorted(held_out(lines)), (False, True)):
        yield bound(mix, ratio, seed, length, demand, foresight)


def leave_evidence(directory: Path, lines: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "policy.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    (directory / "policy.svg").write_text(plot(gains(counted(lines))))


def _chatting() -> list[str]:
    """Nobody knows the true distribution of recorded gaps."""
    return [name for name in POLICIES if name != "informed"]


def _told(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line["policy"] == POLICIES[-1]:
            click.echo(f"seed {line['seed']}: {line['mix']} at {line['ratio']}", err=True)
        yield line


if __name__ == "__main__":
    main()
