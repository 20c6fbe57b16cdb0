"""What drafts bring: recorded agent sessions with and without them, through the engine's own core.

    python -m bench.speculate --evidence DIR

What the assistant said is recorded: its tokens are forced, by a mask that admits one, in both runs, and everything else
is done as ever, so that drafts stand as often as they would have. Then the model speaks for itself, with every option
of sampling, and its tokens with drafts must be those without. Thinks with and without take turns, in this process.

`--trace FILE` replays recordings: a JSON object per line with `id` and `messages` (role, content). Without one,
sessions are made of this project's sources: files are read, and written back with changes.
`--sabotage unverified` must turn the figure red: drafts are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench import evidence
from bench.evidence import Line, load_average
from bench.quiet import Watch
from bench.runners import opened_backend
from bench.speculate_figures import MODES, figures, misses, report
from bench.verdict import show, tell
from engine import core as core_module
from engine.constraint import Constraint
from engine.core import EngineCore
from engine.drafts import Draft
from engine.drawing import Answer, token_of
from engine.facts import PAGE_SIZE
from engine.lanes import Lanes
from engine.live import Guides, Live
from engine.modelfile import model_name
from engine.pages import PagePool
from engine.request import GenerateSpec, Limits
from engine.sampling import Sampling
from engine.scheduler import Scheduler
from engine.speculator import Speculator
from engine.store import KvStore
from engine.tokens import ChatFormat, load_chat_format
from runtime.cli import ensure_model
from runtime.settings import Settings

_FREE_TOKENS = 64
_LEAST_TOKENS = 12  # of a think that is timed
_SOURCES = ("engine/pages.py", "engine/scheduler.py", "kvtier/policy", "workflows/states.py", "engine/core.py")


@dataclass(frozen=True)
class Wanted:
    """One run."""

    model: Path
    dtype: str
    trace: Path | None
    sessions: int
    turns: int
    batches: tuple[int, ...]
    threads: int
    sabotage: bool
    cpu_time: bool = False


@dataclass(frozen=True)
class Think:
    """A transcript up to what the assistant says, and that. `longest_output`: tokens of what a tool said in it."""

    session: str
    turn: int
    longest_output: int
    prompt: tuple[int, ...]
    said: tuple[int, ...]


class Forced(Constraint):
    """Admits one token at each position. Drafts are not told of it."""

    def __init__(self, said: Sequence[int], vocab: int) -> None:
        self._said, self._at, self._vocab = said, 0, vocab

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(self._vocab, np.bool_)
        mask[self._said[self._at]] = True
        return mask

    def accept(self, token: int) -> bool:
        self._at += 1
        return True

    def back(self, count: int) -> None:
        self._at -= count

    def forced(self) -> list[int]:
        return []

    def valid(self, tokens: Sequence[int]) -> int:
        return len(tokens)


@dataclass
class Heard:
    clock: Callable[[], float]
    tokens: list[int] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    done: dict[str, Any] = field(default_factory=dict)

    def sink(self, frame: dict[str, Any]) -> None:
        now = self.clock()
        if frame["type"] == "tokens":
            self.began_s = self.began_s or now
            self.tokens += frame["ids"]
        elif frame["type"] in ("done", "error"):
            self.ended_s, self.done = now, frame


class Engine:
    """A core whose turns are taken here. Each mode has a speculator of its own, which learns from its own steps."""

    def __init__(self, wanted: Wanted, context: int) -> None:
        blocks = (context // PAGE_SIZE + 1) * (2 * max(wanted.batches) + 2)
        facts, backend = opened_backend(wanted.model, wanted.dtype, blocks, wanted.threads)
        inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lanes = Lanes(inbox.put)
        pool = PagePool(blocks)
        store = KvStore(backend, pool, None, self._lanes, b"b" * 32, facts.page_bytes(wanted.dtype))
        limits = Limits(context, facts.vocab, blocks * PAGE_SIZE)
        self._clock = time.process_time if wanted.cpu_time else time.perf_counter
        self._core = EngineCore(backend, store, Scheduler(pool), limits, (), inbox, clock=self._clock)
        self._speculators = {mode: Speculator(enabled=mode == "drafts") for mode in MODES}
        self.vocab = facts.vocab
        self.identity = backend.identity
        self._names = iter(range(1 << 30))

    def close(self) -> None:
        self._lanes.close()

    def play(self, mode: str, asked: Sequence[tuple[Think, Sampling | None, int]]) -> list[Heard]:
        """Thinks side by side; `sampling` None forces what was said."""
        self._core.speculator = self._speculators[mode]
        heard = [Heard(self._clock) for _ in asked]
        for (think, sampling, count), one in zip(asked, heard, strict=True):
            name = f"{think.session}-{mode}-{next(self._names)}"
            rules = sampling or Sampling()
            spec = GenerateSpec(name, name, 0, think.prompt, count, sampling=rules)
            guides = Guides(Forced(think.said, self.vocab)) if sampling is None else Guides()
            self._core.submit(spec, guides, one.sink)
        while not all(one.done for one in heard):
            self._core.turn()
        return heard


def measure(wanted: Wanted) -> list[Line]:
    """Every raw measurement of a run."""
    _, chat = load_chat_format(wanted.model)
    with_context = 8192
    thinks = list(_thinks(wanted, chat, with_context))
    if wanted.sabotage:
        core_module.token_of = _unverified  # type: ignore[attr-defined]
    engine = Engine(wanted, with_context)
    lines: list[Line] = [
        {
            "kind": "about",
            "model": model_name(wanted.model),
            "dtype": wanted.dtype,
            "backend": engine.identity.backend,
            "instruction_set": engine.identity.instruction_set,
            "trace": wanted.trace.name if wanted.trace else "sources",
            "thinks": len(thinks),
            "threads": wanted.threads,
            "clock": "cpu" if wanted.cpu_time else "wall",
        }
    ]
    try:
        watch = Watch([])
        for batch in wanted.batches:
            lines += _timed(engine, thinks, batch, watch)
        lines += _free(engine, thinks)
    finally:
        engine.close()
        core_module.token_of = token_of  # type: ignore[attr-defined]
    return lines


def _timed(engine: Engine, thinks: Sequence[Think], batch: int, watch: Watch) -> Iterator[Line]:
    """Groups of `batch` thinks of about the same length, in both modes, in turns."""
    order = sorted(thinks, key=lambda one: (len(one.said), one.session)) if batch > 1 else list(thinks)
    for number, start in enumerate(range(0, len(order) - batch + 1, batch)):
        group = order[start : start + batch]
        tell(f"batch {batch}: thinks {start + 1} to {start + batch} of {len(order)}")
        for mode in MODES if number % 2 else MODES[::-1]:
            watch.cores()
            heard = engine.play(mode, [(one, None, len(one.said)) for one in group])
            foreign = watch.cores()
            began, ended = max(one.began_s for one in heard), min(one.ended_s for one in heard)
            for think, one in zip(group, heard, strict=True):
                yield {
                    "kind": "think",
                    "batch": batch,
                    "group": number,
                    "session": think.session,
                    "turn": think.turn,
                    "mode": mode,
                    "context": len(think.prompt),
                    "longest_output": think.longest_output,
                    "tokens": len(one.tokens),
                    "seconds": one.ended_s - one.began_s,
                    "together_s": ended - began,
                    "drafted": one.done["drafted"],
                    "accepted": one.done["accepted"],
                    "foreign_cores": foreign,
                    "load": load_average(),
                    "said": _digest(one.tokens),
                }


def _free(engine: Engine, thinks: Sequence[Think]) -> Iterator[Line]:
    """What the model says itself."""
    for number, think in enumerate(thinks[:: max(1, len(thinks) // 8)]):
        draw = random.Random(f"free {number}")
        sampling = Sampling(
            temperature=(0.0, 0.7, 1.0)[number % 3],
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 40]),
            seed=number,
            min_p=draw.choice([0.0, 0.02]),
            repetition_penalty=draw.choice([1.0, 1.05]),
            frequency_penalty=draw.choice([0.0, 0.1]),
        )
        for mode in MODES:
            (heard,) = engine.play(mode, [(think, sampling, _FREE_TOKENS)])
            told = {"ids": heard.tokens, "drafted": heard.done["drafted"]}
            yield {"kind": "free", "number": number, "mode": mode, **told}


def _unverified(live: Live, answer: Answer, index: int, draft: Draft) -> int | None:
    return draft.tokens[index] if index < len(draft.tokens) else token_of(live, answer, index, draft)


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


# -- sessions ---------------------------------------------------------------------------------------------------------


def _thinks(wanted: Wanted, chat: ChatFormat, context: int) -> Iterator[Think]:
    sessions = _recorded(wanted.trace) if wanted.trace is not None else _made()
    for name, messages in sessions[: wanted.sessions]:
        yield from _of_session(name, messages, chat, wanted.turns, context)


def _recorded(trace: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return [(row["id"], row["messages"]) for row in rows]


def _made() -> list[tuple[str, list[dict[str, Any]]]]:
    """Somebody reads a source of this project piece by piece, and writes pieces of it back with a name changed."""
    root = Path(__file__).parent.parent
    made = []
    for source in _SOURCES:
        path = root / source
        if not path.is_file():
            continue
        text = path.read_text().splitlines()
        messages = [
            {"role": "system", "content": "You work on a project in Python."},
            {"role": "user", "content": f"Members of classes in {source} should not be private. Change that."},
            {"role": "assistant", "content": f"I read {source} piece by piece, and change it as I go."},
        ]
        for at in range(0, min(len(text), 240), 60):
            piece = "\n".join(text[at : at + 60])
            messages += [
                {"role": "user", "content": f"$ sed -n {at + 1},{at + 60}p {source}\n{piece}"},
                {"role": "assistant", "content": "I change the names here:\n" + piece.replace("self._", "self.")[:600]},
            ]
        made.append((source, messages))
    return made


def _of_session(
    name: str, messages: Sequence[dict[str, Any]], chat: ChatFormat, turns: int, context: int
) -> Iterator[Think]:
    tokens = chat.opening(messages[0]["content"]) if messages[0]["role"] == "system" else chat.opening(None)
    turn, longest, asked = 0, 0, False
    for message in messages[messages[0]["role"] == "system" :]:
        if message["role"] != "assistant":
            written = chat.user(message["content"])
            longest = max(longest, len(written) if asked else 0)
            tokens, asked = tokens + written, True  # the first one is the task
            continue
        opened = [*tokens, *chat.assistant_open()]
        whole = [*tokens, *chat.assistant(message["content"])]
        said = whole[len(opened) : len(whole) - len(chat.assistant_close())]
        if turn >= turns or len(whole) >= context:
            return
        if len(said) >= _LEAST_TOKENS:
            yield Think(name, turn, longest, tuple(opened), tuple(said))
            turn += 1
        tokens = whole


@click.command()
@click.option(
    "--model", default="qwen2.5-coder-0.5b-instruct", show_default=True, help="A name in the catalogue, or a file."
)
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--sessions", default=4, show_default=True)
@click.option("--turns", default=6, show_default=True, help="Thinks of each session.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option(
    "--cpu-time", is_flag=True, help="Count this process's CPU seconds: for a busy machine, with --threads 1."
)
@click.option("--evidence", "evidence_dir", type=click.Path(path_type=Path), help="Leave raw samples here.")
@click.option(
    "--sabotage", type=click.Choice(["unverified"]), help="Take drafts as they are; must turn the figure red."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    model: str,
    dtype: str,
    trace: Path | None,
    sessions: int,
    turns: int,
    batches: tuple[int, ...],
    threads: int,
    cpu_time: bool,
    evidence_dir: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Tokens a second with drafts over without; exit status 1 if a token differs or they cost more than they bring."""
    settings = Settings.load(overrides={"TENUTO_MODEL": model})
    ensure_model(settings)
    lines = measure(
        Wanted(settings.model_path, dtype, trace, sessions, turns, batches, threads, sabotage is not None, cpu_time)
    )
    if evidence_dir is not None:
        evidence.leave(evidence_dir / "speculate.jsonl", lines)
    figure = figures(lines)
    show(figure, misses(figure), lambda: report(lines, figure), as_json=as_json)


if __name__ == "__main__":
    main()
