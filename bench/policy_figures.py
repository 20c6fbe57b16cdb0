"""The figures of the tier policy, recomputed from the lines of evidence alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.policy_halved import HALVED
from bench.policy_run import BOUND, BOUND_WITH_FORESIGHT, NONE_OURS, ORACLES, OUR_ORDER, OURS, POLICIES, RIVALS

TUNED_ON = range(10)
"""Seeds that were looked at while the policy was made; the others are held out."""
PRESSED = 1.8
"""The least ratio at which the tiers are under pressure: shares are of these."""
BAR_SHARE = 0.95
BAR_VS_NO_TIER = 1.0
BAR_BEHIND_INFORMED = 0.03
"""What learning may cost: shares lost against the same rule that knows the true distributions."""
BAR_THRASH = 0.0
"""Nothing is promoted that is not about to be served."""
BAR_CHANGED = 0.05
"""Of the answers on a machine near its break-even, that halving every bandwidth must change."""
Cell = tuple[str, float]
Line = dict[str, Any]


def costs(lines: list[Line], wanted: Callable[[int], bool] = lambda seed: True) -> dict[Cell, dict[str, float]]:
    """Mean first-token time in seconds, over all first tokens of the wanted seeds: {(mix, ratio): {policy: s}}."""
    waited: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for line in lines:
        if line["policy"] != HALVED and wanted(line["seed"]):
            total = waited[line["mix"], line["ratio"]][line["policy"]]
            total[0] += line["waited_s"]
            total[1] += line["firsts"]
    return {cell: {name: s / n for name, (s, n) in of.items()} for cell, of in waited.items()}


def gains(lines: list[Line], wanted: Callable[[int], bool] = lambda seed: True) -> dict[Cell, dict[str, float]]:
    """Each policy's part of what the oracle gains over no tier."""
    found = {}
    for cell, cost in costs(lines, wanted).items():
        whole = cost["none"] - min(cost[name] for name in ORACLES)
        found[cell] = {name: (cost["none"] - value) / whole for name, value in cost.items()}
    return found


def worst_cell(lines: list[Line]) -> Cell:
    """Where ours keeps least of the oracle's gain, of the cells under pressure, on the seeds held out."""
    share = _shares(lines)
    return min((cell for cell in share if cell[1] >= PRESSED), key=lambda cell: share[cell][OURS])


def held_out(lines: list[Line]) -> set[int]:
    """The seeds that count: those never tuned on or, with none of these, all."""
    seeds = {line["seed"] for line in lines if line["mix"] != "chat"}
    return seeds - set(TUNED_ON) or seeds


def counted(lines: list[Line]) -> list[Line]:
    """What tables and plots are of: the seeds that count, and the recorded traffic."""
    seeds = held_out(lines)
    return [line for line in lines if line["mix"] == "chat" or line["seed"] in seeds]


def _shares(lines: list[Line]) -> dict[Cell, dict[str, float]]:
    seeds = held_out(lines)
    return gains([line for line in lines if line["mix"] != "chat"], lambda seed: seed in seeds)


def figures(lines: list[Line]) -> dict[str, Any]:
    """The figures; shares are of the seeds held out.

    `oracle_share`, `best_rival_share`: in the worst cell (mix and ratio) for ours, and for the best rival in that
    cell. `least_lead`: ours less the best rival's share, in the cell where that is least.
    `known_distributions_share`: in the worst cell, of the same rule with the true distributions given;
    `behind_informed`: the most that ours is behind it in any cell. `bound_share`: in the worst cell, of the relaxation
    without foresight (`bench.policy_bound`); `bound_of_bounds`: the same against that relaxation with foresight.
    `order_share`: what our order of service brings there without any tier; `best_rival_in_our_order`: the best share of
    a rival that is served in it; `same_order_share`, `same_order_bound`: ours and the relaxation where no tier is
    served in that order too, so that only tiers count. `thrash`: bytes promoted and not used over bytes promoted, of
    ours, in the worst cell for that. `halved_changes`: answers that half the bandwidth changes.
    """
    share = _shares(lines)
    pressed = {cell: of for cell, of in share.items() if cell[1] >= PRESSED}
    worst = worst_cell(lines)
    best = max(RIVALS, key=lambda name: pressed[worst][name])
    everything = costs(lines)
    thrashed = {cell: of[OURS] for cell, of in thrash(lines).items() if OURS in of}
    on_chat = {str(cell[1]): round(of[OURS], 3) for cell, of in gains(_chat(lines)).items()}
    return {
        "oracle_share": round(pressed[worst][OURS], 4),
        "worst_vs_no_tier": round(max(of[OURS] / of["none"] for of in everything.values()), 4),
        "best_rival": best,
        "best_rival_share": round(pressed[worst][best], 4),
        "thrash": round(max(thrashed.values(), default=0.0), 4),
        "worst_mix": worst[0],
        "worst_ratio": worst[1],
        "known_distributions_share": round(pressed[worst]["informed"], 4),
        **_bounds(costs(counted(lines))[worst]),
        **_same_order(costs(counted(lines))[worst]),
        "order_share": _rounded(pressed[worst].get(NONE_OURS)),
        "best_rival_in_our_order": _rounded(_best_in_our_order(pressed[worst])),
        "behind_informed": round(max(of["informed"] - of[OURS] for of in pressed.values()), 4),
        "least_lead": round(min(of[OURS] - max(of[name] for name in RIVALS) for of in pressed.values()), 4),
        "halved_changes": _changed(lines),
        "chat_share": on_chat,
        "seeds_held_out": len(held_out(lines)),
    }


def _bounds(cost: dict[str, float]) -> dict[str, float | None]:
    """Of the worst cell; None where the relaxation was not computed."""
    if BOUND not in cost:
        return {"bound_share": None, "bound_of_bounds": None}
    oracle_s = min(cost[name] for name in ORACLES)
    above, seen = cost["none"] - cost[BOUND], cost["none"] - cost.get(BOUND_WITH_FORESIGHT, oracle_s)
    return {"bound_share": round(above / (cost["none"] - oracle_s), 4), "bound_of_bounds": round(above / seen, 4)}


def _best_in_our_order(share: dict[str, float]) -> float | None:
    return max((share[name + OUR_ORDER] for name in RIVALS if name + OUR_ORDER in share), default=None)


def _same_order(cost: dict[str, float]) -> dict[str, float | None]:
    """None where it was not simulated."""
    if NONE_OURS not in cost:
        return {"same_order_share": None, "same_order_bound": None}
    whole = cost[NONE_OURS] - min(cost[name] for name in ORACLES)
    parts = {name: (cost[NONE_OURS] - cost[name]) / whole if name in cost else None for name in (OURS, BOUND)}
    return {"same_order_share": _rounded(parts[OURS]), "same_order_bound": _rounded(parts[BOUND])}


def _changed(lines: list[Line]) -> float | None:
    asked = [line for line in lines if line["policy"] == HALVED]
    return round(sum(line["changed"] for line in asked) / sum(line["asked"] for line in asked), 4) if asked else None


def _chat(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["mix"] == "chat"]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def thrash(lines: list[Line]) -> dict[Cell, dict[str, float]]:
    """Bytes that were read to the device and left it unused, over all that were read: {cell: {policy: part}}."""
    return _parts(lines, "promoted_unused_bytes", ("promoted_bytes", "promoted_unused_bytes"))


def read_back(lines: list[Line]) -> dict[Cell, dict[str, float]]:
    """Bytes read back from the tiers over bytes written to them."""
    return _parts(lines, "restored_bytes", ("stored_bytes",))


def _parts(lines: list[Line], part: str, whole: tuple[str, ...]) -> dict[Cell, dict[str, float]]:
    sums: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for line in lines:
        if part in line:
            total = sums[line["mix"], line["ratio"]][line["policy"]]
            total[0] += line[part]
            total[1] += sum(line[name] for name in whole)
    return {cell: {name: x / y if y else 0.0 for name, (x, y) in of.items()} for cell, of in sums.items()}


def missed(figure: dict[str, Any]) -> list[str]:
    """The bars that are not reached, each in a sentence."""
    found = []
    if figure["oracle_share"] < BAR_SHARE:
        found.append(f"ours keeps {figure['oracle_share']:.1%} of the oracle's gain, {BAR_SHARE:.0%} is wanted")
        if figure["bound_share"] is not None:
            found[-1] += f"; the relaxation without foresight keeps {figure['bound_share']:.1%} there"
    if figure["least_lead"] <= 0:
        found.append(f"a published rule is ahead of ours by {-figure['least_lead']:.1%} of the oracle's gain")
    if figure["worst_vs_no_tier"] > BAR_VS_NO_TIER:
        found.append(f"ours waits {figure['worst_vs_no_tier']:.2f} times as long as no tier")
    if figure["behind_informed"] > BAR_BEHIND_INFORMED:
        found.append(f"ours is {figure['behind_informed']:.1%} behind the same rule with known distributions")
    if figure["thrash"] > BAR_THRASH:
        found.append(f"{figure['thrash']:.1%} of what ours promotes is not used")
    if figure["halved_changes"] is not None and figure["halved_changes"] < BAR_CHANGED:
        found.append(f"half the bandwidth changes {figure['halved_changes']:.1%} of the answers")
    return found


def is_green(figure: dict[str, Any]) -> bool:
    return not missed(figure)


def table(lines: list[Line]) -> str:
    """For people: seconds to the first token and the part of the oracle's gain, thrash and bytes read back."""
    lines = counted(lines)
    cost, share, unused, back = costs(lines), gains(lines), thrash(lines), read_back(lines)
    rows = ["mix    ratio  " + "".join(f"{name[:16]:>18}" for name in POLICIES)]
    for cell in cost:
        told = {name: f"{cost[cell][name]:9.3f} s {share[cell][name]:6.1%}" for name in cost[cell]}
        rows.append(f"{cell[0]:<6} {cell[1]:<6} " + "".join(f"{told.get(name, ''):>18}" for name in POLICIES))
        bounds = [f"{name} {told[name].strip()}" for name in told if name not in POLICIES]
        rows += [f"{'':14}{'; '.join(bounds)}"] if bounds else []
    rows += ["", "promoted and not used / promoted, read back / written"]
    for cell, of in unused.items():
        told = {name: f"{of[name]:6.1%} {back[cell][name]:6.2f}" for name in of}
        rows.append(f"{cell[0]:<6} {cell[1]:<6} " + "".join(f"{told.get(name, ''):>18}" for name in POLICIES))
    return "\n".join(rows)
