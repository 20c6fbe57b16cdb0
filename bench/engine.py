"""Our engine beside llama.cpp and transformers: the same weights, the same steps, in turns, on the same threads.

    python -m bench.engine --json

llama.cpp is built natively on this machine from its source, with flash attention; where the machine has an
instruction set that the build lacks, the ratios are refused. Every engine has a process of its own and they take
turns, so that a ratio compares timings of the same minute. After two rounds of everything, only those formats and
modes go on that are within reach of the fastest. Each timing waits a little for other programs to leave the machine
alone; where they do not, the ratios are refused as well.

`--sabotage` must turn a figure red: `slow` runs each of our steps eight times, `unequal` flips a bit of a batch's
logits, `stall` stops the engine beside a long prompt, `altered` improves the evidence after the fact, `plain-peer` and
`flash-off` hobble llama.cpp.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench import evidence, formats, llamacpp, streams
from bench.bandwidth import Bandwidth
from bench.columns import COLUMNS, QUICK, Column
from bench.compiled import BenchError
from bench.engine_figures import BF16, OURS, best, figures, misses, table
from bench.engine_report import report
from bench.evidence import Line
from bench.quiet import DISTURBED_CORES, Watch
from bench.runners import OURS as MODES
from bench.runners import opened_weights
from bench.verdict import show, tell
from bench.worker import Spec, Worker, open_workers
from engine.modelfile import model_name
from runtime.cli import ensure_model
from runtime.settings import Settings

SABOTAGES = ("slow", "unequal", "stall", "altered", "plain-peer", "flash-off")
SCREENING = 2  # rounds in which everyone runs
_REACH = 0.8  # who is slower than this part of the fastest of its family after them does not go on
_SLOWED = 8
_PATIENCE_S = 40.0  # spent per round on what other programs disturb


@dataclass(frozen=True)
class Wanted:
    """One run of the bench. `peer` is the family that ratios are taken to."""

    model: Path
    rounds: int
    threads: int
    quick: bool
    sabotage: str | None
    peer: str = "llama.cpp"
    ours: tuple[str, ...] = MODES
    gap_modes: tuple[str, ...] = ("bf16", "w4a8")
    only: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        return QUICK if self.quick else COLUMNS


@dataclass
class Rounds:
    """The turns of one run and what they left."""

    wanted: Wanted
    workers: dict[str, Worker]
    bandwidth: Bandwidth
    keep: Callable[[list[Line]], None]
    lines: list[Line] = field(default_factory=list)
    patience_s: float = 0.0  # what is left of the round's

    def run(self) -> None:
        watch = Watch([worker.pid for worker in self.workers.values()])
        for number in range(self.wanted.rounds):
            self.patience_s = 0.0 if self.wanted.quick else _PATIENCE_S
            for kind, read in (("stream", self.bandwidth.stream), ("matrices", self.bandwidth.matrices)):
                self._leave({"kind": "bandwidth", "round": number, "read": kind, "bytes_per_s": read()})
            for column in self.wanted.columns:
                names = self._turns(column.name, number)
                for name in names:
                    timing = self._timing(name, column.name, watch)
                    self._leave({"kind": "timing", "round": number, "engine": name, "column": column.name, **timing})
            self.keep(self.lines)
            tell(f"round {number + 1} of {self.wanted.rounds} done, load {evidence.load_average()}")
        for name in self.workers:
            if name.startswith(f"{OURS}/"):
                self._leave({"kind": "alone", "engine": name, "column": "batch8", "rows": self._alone(name)})

    def _timing(self, name: str, column: str, watch: Watch) -> Line:
        """One timing; a disturbed one is thrown away and made again while the round's patience lasts."""
        while True:
            self.patience_s -= watch.wait(min(_PATIENCE_S / 20, self.patience_s))
            began = time.monotonic()
            timing = self.workers[name].timing(column)
            foreign = watch.cores()
            if foreign <= DISTURBED_CORES or self.patience_s <= 0:
                return {**timing, "foreign_cores": foreign}
            self.patience_s -= time.monotonic() - began

    def _turns(self, column: str, number: int) -> list[str]:
        """Who runs a column in a round; the order is turned from round to round."""
        names = [*self.workers]
        if number >= SCREENING:
            names = [name for name in names if self._goes_on(name, column)]
        at = number % len(names)
        return names[at:] + names[:at]

    def _goes_on(self, name: str, column: str) -> bool:
        family = name.partition("/")[0]
        if column == "decode_128" and name in (BF16, f"{self.wanted.peer}/bf16"):
            return True
        if family not in (OURS, self.wanted.peer):
            return True
        first = [line for line in self.lines if line.get("round", 0) < SCREENING]
        rates = {row["engine"]: row[column][0] for row in table(first) if row[column]}
        fastest = best(first, family, column)
        return fastest is not None and rates[name] >= _REACH * rates[fastest]

    def _alone(self, name: str) -> list[str]:
        rows = self.workers[name].alone("batch8")
        if self.wanted.sabotage == "unequal":
            rows[-1] = f"{int(rows[-1], 16) ^ 1:016x}"
        return rows

    def _leave(self, line: Line) -> None:
        self.lines.append({**line, "load": evidence.load_average()})


def measure(wanted: Wanted, keep: Callable[[list[Line]], None] = lambda lines: None) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence. Raises BenchError.

    `keep` is given what there is after every round, so that a run that is ended early leaves something.
    """
    files = _peer_files(wanted)
    options = {
        "slowed": _SLOWED if wanted.sabotage == "slow" else 1,
        "plain_peer": wanted.sabotage == "plain-peer",
        "flash_off": wanted.sabotage == "flash-off",
    }
    names = [f"{OURS}/{mode}" for mode in wanted.ours]
    names += [f"llama.cpp/{name}" for name in files] if files else ["torch/bf16"]
    names += [] if wanted.quick else ["transformers/bf16"]
    names = [name for name in names if not wanted.only or name in wanted.only]
    specs = [
        Spec(name, wanted.model, files.get(name.partition("/")[2]), wanted.columns, wanted.threads, options)
        for name in names
    ]
    matrices = _matrices(wanted.model)
    lines = [_about(wanted, sum(array.nbytes for array in matrices))]
    workers, absent = open_workers(specs)
    lines += [{"kind": "engine", "name": name, **worker.about} for name, worker in workers.items()]
    lines += [{"kind": "absent", "name": name, "why": why} for name, why in absent.items()]
    bandwidth = Bandwidth(matrices, wanted.threads)
    rounds = Rounds(wanted, workers, bandwidth, lambda done: keep(lines + done))
    try:
        rounds.run()
    finally:
        bandwidth.close()
        for worker in workers.values():
            worker.close()
    lines += rounds.lines
    keep(lines)
    return lines + _gaps(wanted, [name for name in wanted.gap_modes if f"{OURS}/{name}" in workers])


def _peer_files(wanted: Wanted) -> dict[str, Path]:
    if wanted.peer != "llama.cpp":
        return {}
    found = llamacpp.build(tell, native=wanted.sabotage != "plain-peer")
    return formats.files(found, wanted.model, tell, wanted.threads)


def _matrices(model: Path) -> list[Any]:
    """What a decode step multiplies by: every matrix once; the embedding only where it is the head as well."""
    facts, weights = opened_weights(model, "bf16")
    return [
        array for name, array in weights.arrays.items() if array.ndim == 2 and (name != "embed" or facts.tied_output)
    ]


def _about(wanted: Wanted, matrix_bytes: int) -> Line:
    return {
        "kind": "about",
        "model": model_name(wanted.model),
        "threads": wanted.threads,
        "rounds": wanted.rounds,
        "quick": wanted.quick,
        "sabotage": wanted.sabotage,
        "peer": wanted.peer,
        "matrix_bytes": matrix_bytes,
        "columns": [{"name": column.name, "tokens": column.tokens} for column in wanted.columns],
        "machine": platform.processor() or platform.machine(),
        "load": evidence.load_average(),
    }


def _gaps(wanted: Wanted, modes: Sequence[str]) -> list[Line]:
    lines: list[Line] = []
    for mode in modes:
        tell(f"eight streams and a long prompt, {mode}")
        repeats, prompt = (1, 512) if wanted.quick else (3, streams.PROMPT)
        lines += asyncio.run(
            streams.measure(
                wanted.model,
                mode,
                threads=wanted.threads,
                repeats=repeats,
                prompt=prompt,
                stalled=wanted.sabotage == "stall",
            )
        )
    return lines


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--only", multiple=True, metavar="ENGINE", help="Run these alone, as they are named in the table.")
@click.option("--evidence", "directory", type=click.Path(path_type=Path), default=Path("bench/out"), show_default=True)
@click.option("--quick", is_flag=True, help="Small shapes and no llama.cpp: shows the form, measures nothing.")
@click.option("--sabotage", type=click.Choice(SABOTAGES), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    model: str,
    rounds: int,
    threads: int,
    only: tuple[str, ...],
    directory: Path,
    quick: bool,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Our engine beside llama.cpp and transformers."""
    settings = Settings.load(overrides={"TENUTO_MODEL": model})
    ensure_model(settings)
    peer = "torch" if quick else "llama.cpp"
    modes = {"ours": ("bf16",), "gap_modes": ("bf16",)} if quick else {}
    rounds = min(rounds, 2) if quick else rounds
    wanted = Wanted(settings.model_path, rounds, threads, quick, sabotage, peer, only=only, **modes)
    path = directory / "engine.jsonl"
    try:
        evidence.leave(path, measure(wanted, lambda lines: evidence.leave(path, lines)))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    if sabotage == "altered":
        evidence.alter(path, "timing", "seconds", 0.5)
    lines, sealed = evidence.read(path)
    figure = figures(lines, sealed)
    show(figure, misses(figure), lambda: report(lines, figure), as_json=as_json)


if __name__ == "__main__":
    main()
