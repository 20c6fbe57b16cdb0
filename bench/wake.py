"""What waking a session costs, by where its KV waited: on the device, on the host, on NVMe, shared, or nowhere.

    python -m bench.wake --evidence DIR

Two figures per context and place. *Usable*: the whole prefix is on the device again, by the receipt of a `prefetch`;
where there is no tier, the prefix is computed, less what one more token over a prefix that is there takes. *First
token*: from the pause's end to the first token after a tool result of 64 tokens, the way the runtime does it, a
prefetch and the generation right behind it. The states take turns, so that a ratio compares times of the same minute.

Cold means: our reads of NVMe go past the page cache, and before every wake the kernel is asked to drop what it has of
the files of both directories. What a hypervisor keeps is out of reach, for the raw reads as well.

`disk_fraction` compares the engine's reads with raw reads of the same files: the whole way to a usable prefix, in which
the engine looks up, reads into its pool, verifies and answers. `tier_fraction` does so with the tier's own face, called
in this process (`TierStack.read_into`). Both rest on the largest context.

`--sabotage` must turn a figure red: `flip` changes a bit of every segment before it is read, `slow` gives the engine a
disk of 5 MB/s per read, `foreign` wakes another prompt's tokens from NVMe.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import evidence
from bench.compiled import BenchError
from bench.evidence import Line
from bench.quiet import Watch
from bench.served import Served, served
from bench.verdict import show, tell
from bench.wake_bed import ANSWER_TOKENS, NVME, RESULT_TOKENS, STATES, Bed
from bench.wake_disk import READS, DiskReads
from bench.wake_figures import figures, misses
from bench.wake_report import report
from engine import EngineClient, ModelCard
from engine.modelfile import model_name
from runtime.cli import ensure_model
from runtime.settings import Settings

SABOTAGES = ("flip", "slow", "foreign")
ROUNDS: Mapping[int, int] = {256: 15, 512: 7, 1024: 7, 2048: 15, 4096: 5, 8000: 3}
_LONG_ROUNDS, _DISK_ROUNDS = 3, 9
_SPARE_TOKENS = 1024
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Wanted:
    """One run of the bench; `rounds` by context."""

    model: Path
    rounds: Mapping[int, int]
    disk_rounds: int
    threads: int
    sabotage: str | None

    @property
    def pool_tokens(self) -> int:
        """A pinned prefix, one that wakes, and one that is on its way out."""
        return 3 * max(self.rounds) + _SPARE_TOKENS


async def measure(wanted: Wanted, keep: Callable[[list[Line]], None] = lambda lines: None) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence. Raises BenchError.

    `keep` is given what there is after every context, so that a run that is ended early leaves something.
    """
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as directory:
        async with _bed(wanted, Path(directory)) as (bed, watch):
            card = bed.tiered.card
            lines = [_about(wanted, card)]
            await bed.wake(min(wanted.rounds), 0, NVME)  # the first one ever pays for memory that is touched first
            await bed.clear()
            for context, rounds in sorted(wanted.rounds.items()):
                lines += await _context(bed, watch, context, rounds)
                if context == max(wanted.rounds) and wanted.sabotage != "flip":
                    lines += await _disk(bed, watch, context, wanted.disk_rounds)
                await bed.clear()
                keep(lines)
            stats = await bed.tiered.stats()
            lines.append({"kind": "after", "quarantined": stats["quarantined"], "integrity": stats["integrity"]})
    return lines


async def _context(bed: Bed, watch: Watch, context: int, rounds: int) -> list[Line]:
    lines = []
    for number in range(rounds):
        turn = number % len(STATES)
        for state in STATES[turn:] + STATES[:turn]:
            watch.cores()
            line = await bed.wake(context, number, state)
            lines.append({**line, "foreign_cores": watch.cores(), "load": evidence.load_average()})
        tell(f"{context:,} tokens: round {number + 1} of {rounds}")
    return lines


async def _disk(bed: Bed, watch: Watch, context: int, rounds: int) -> list[Line]:
    """The files of one prefix, read raw, by the tier, and by the engine."""
    card, lines = bed.tiered.card, list[Line]()
    page_bytes = card.page_size * card.kv_bytes_per_token
    with DiskReads(bed.nvme, bytes.fromhex(card.fingerprint), page_bytes, await bed.keys(NVME)) as reads:
        for number in range(rounds):
            turn = number % len(READS)
            for read in READS[turn:] + READS[:turn]:
                watch.cores()
                taken = bed.restored(context) if read == "path" else asyncio.to_thread(reads.timed, read)
                size, seconds = await taken
                line = {"kind": "disk", "context": context, "round": number, "read": read}
                line |= {"bytes": size, "seconds": seconds, "foreign_cores": watch.cores()}
                lines.append({**line, "load": evidence.load_average()})
    return lines


@contextlib.asynccontextmanager
async def _bed(wanted: Wanted, root: Path) -> AsyncIterator[tuple[Bed, Watch]]:
    """Both engines and a client of each."""
    common: dict[str, Any] = {"threads": wanted.threads, "kv_tokens": wanted.pool_tokens}
    for name in ("plain", "tiered"):
        (root / name).mkdir()
    async with contextlib.AsyncExitStack() as stack:
        plain = await stack.enter_async_context(served(wanted.model, root / "plain", **common))
        tiers = _tiers(root, plain.ready["kv_bytes_per_token"] * wanted.pool_tokens)
        arena = stack.enter_context(tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else root))
        module = "bench.wake_slow" if wanted.sabotage == "slow" else "engine"
        options = {**common, **tiers, "host_arena": Path(arena) / "kv"}
        tiered = await stack.enter_async_context(served(wanted.model, root / "tiered", module=module, **options))

        async def client(engine: Served) -> EngineClient:
            return await stack.enter_async_context(await EngineClient.connect(engine.socket))

        bed = Bed(
            await client(tiered),
            await client(plain),
            tiers["nvme_dir"],
            tiers["shared"],
            flip=wanted.sabotage == "flip",
            foreign=wanted.sabotage == "foreign",
        )
        yield bed, Watch([tiered.pid, plain.pid])


def _tiers(root: Path, pool_bytes: int) -> dict[str, Any]:
    """Every tier has room for as much as the device, and a good deal more."""
    room = 2 * pool_bytes + (256 << 20)
    (root / "shared").mkdir()
    places = {"nvme_dir": root / "nvme", "shared": root / "shared"}
    return {**places, "host_bytes": room, "nvme_bytes": room, "shared_bytes": room}


def _about(wanted: Wanted, card: ModelCard) -> Line:
    return {
        "kind": "about",
        "model": model_name(wanted.model),
        "backend": card.backend,
        "dtype": card.dtype,
        "threads": wanted.threads,
        "rounds": {str(context): count for context, count in wanted.rounds.items()},
        "kv_bytes_per_token": card.kv_bytes_per_token,
        "sabotage": wanted.sabotage,
        "load": evidence.load_average(),
    }


def rounds_of(contexts: Sequence[int], rounds: int | None) -> dict[int, int]:
    """How often each context is measured; long ones less often."""
    return {context: rounds or ROUNDS.get(context, _LONG_ROUNDS) for context in contexts}


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--contexts", default=",".join(map(str, ROUNDS)), show_default=True, help="Tokens, with commas between.")
@click.option("--rounds", type=click.IntRange(min=1), help="Of every context. By default 15 at 256 and 2,048.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), default=Path("bench/out"), show_default=True)
@click.option("--sabotage", type=click.Choice(SABOTAGES), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    model: str,
    contexts: str,
    rounds: int | None,
    threads: int,
    directory: Path,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """What waking a session costs, by where its KV waited."""
    settings = Settings.load(overrides={"TENUTO_MODEL": model})
    ensure_model(settings)
    wanted = Wanted(
        settings.model_path, rounds_of(_numbers(contexts), rounds), rounds or _DISK_ROUNDS, threads, sabotage
    )
    path = directory / "wake.jsonl"
    try:
        evidence.leave(path, asyncio.run(measure(wanted, lambda lines: evidence.leave(path, lines))))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    lines, sealed = evidence.read(path)
    figure = figures(lines, sealed)
    show(figure, misses(figure), lambda: report(lines, figure), as_json=as_json)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers with commas between") from error
    least = 2 * (RESULT_TOKENS + ANSWER_TOKENS)
    if min(found) < least or any(context % 16 for context in found):
        raise click.BadParameter(f"contexts are whole pages of 16 tokens, and {least} tokens at least")
    return found


if __name__ == "__main__":
    main()
