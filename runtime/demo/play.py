"""Play the story's session, undisturbed or with kills, and count from outside what happened."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tenuto

from runtime.demo.stack import Stack
from runtime.demo.story import FOLLOW_UP, MESSAGE
from sandbox import BlobStore, snapshots

Watch = Callable[[tenuto.Event], None]
Say = Callable[[str], None]

TOLD = 12  # the last events that a failure shows


@dataclass(frozen=True)
class Kill:
    """SIGKILL `parts`, or send them another signal: in the nth think, once it has sampled `after` tokens, or `after`
    seconds into the nth tool."""

    moment: str  # think or tool
    nth: int
    after: float
    parts: tuple[str, ...]
    number: int = signal.SIGKILL

    def describe(self) -> str:
        unit = f"token {self.after:.0f}" if self.moment == "think" else f"{self.after:.1f} s"
        return f"{self.moment} {self.nth} after {unit}"


def random_kills(rng: random.Random, parts: tuple[str, ...], *, tool_s: Sequence[float]) -> list[Kill]:
    """One kill in a random think and one in a random tool, each at a random moment of it."""
    tool = rng.randrange(len(tool_s))
    return [
        Kill("think", 1 + rng.randrange(len(tool_s)), rng.randrange(1, 16), parts),
        Kill("tool", 1 + tool, rng.uniform(0.05, 0.8) * tool_s[tool], parts),
    ]


@dataclass
class Played:
    """What one session did. `killed`: what died where, with the pids."""

    session_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    recomputed: int = 0
    repeated: int = 0
    calls: int = 0
    killed: list[dict[str, Any]] = field(default_factory=list)
    event_ids: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # what the tools printed


async def play(
    stack: Stack,
    client: tenuto.AsyncClient,
    spec: Mapping[str, Any],
    *,
    kills: Sequence[Kill] = (),
    watch: Watch = lambda _: None,
    say: Say = lambda _: None,
) -> Played:
    """Run the story once and cancel the session at the end. Raises SessionFailed if either turn could not finish."""
    session = await client.sessions.create(**spec)
    played = Played(session.id)
    latest: deque[tenuto.Event] = deque(maxlen=TOLD)
    await session.send(**MESSAGE)
    turn = tenuto.TurnReader(await session.send(**FOLLOW_UP))  # accepted now, taken when the first is answered
    executioner = _Executioner(stack, list(kills), played, say)
    async for event in session.stream():
        watch(event)
        turn.feed(event)
        executioner.feed(event)
        played.event_ids.append(event.id)
        if event.type != "model.delta":
            latest.append(event)
        if event.type == "session.failed":  # the follow-up would be answered all the same
            raise tenuto.SessionFailed(f"{event.data['message']}\nafter {told(latest)}")
        if event.type == "tool.settled":
            played.outputs.append(event.data["preview"])
        if event.type == "kv.recomputed":
            played.recomputed += event.data["tokens"]
        if turn.done:
            break
    await executioner.settled()
    played.text = turn.result().text
    played.token_ids = await session.token_ids()
    played.calls, played.repeated = count_repeats(stack, session.id, await session.checkpoints())
    await session.cancel()
    return played


def told(events: Iterable[tenuto.Event]) -> str:
    """Events as lines, for whoever has to find out what happened."""
    return "\n".join(f"{e.id} {e.type} of step {e.step}, attempt {e.attempt}: {e.data}"[:400] for e in events)


def count_repeats(stack: Stack, session_id: str, checkpoints: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Calls made, and calls that ran more than once, by the marks that the tools left in the workspace and outside."""
    inside, outside = marks(stack, session_id, checkpoints)
    repeats = sum(count - 1 for log in (inside, outside) for count in Counter(log).values())
    return len(set(outside)), repeats


def marks(stack: Stack, session_id: str, checkpoints: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The call keys that the tools left in the last checkpoint's workspace, and outside."""
    store = BlobStore(stack.settings.blobs_dir)
    tree = snapshots.load(checkpoints[-1]["workspace_root"], store)
    logs = [store.get(blob).decode() for path, blob, _ in snapshots.files(tree) if path == "calls.log"]
    log = outside_log(stack, session_id)
    inside, outside = "".join(logs[:1]), log.read_text() if log.exists() else ""
    keys = [[key for key in text.split() if key.startswith(f"{session_id}/")] for text in (inside, outside)]
    return keys[0], keys[1]


def outside_log(stack: Stack, session_id: str) -> Path:
    """The counter outside the workspace. One per session, since each session's tools run as another user."""
    return stack.settings.sandbox_volumes[0].source / f"{session_id}.log"


class _Executioner:
    """Watches the stream and kills at the planned moments."""

    def __init__(self, stack: Stack, kills: list[Kill], played: Played, say: Say) -> None:
        self._stack = stack
        self._kills = kills
        self._played = played
        self._say = say
        self._nth = {"think": 0, "tool": 0}
        self._kind: dict[int, str] = {}
        self._later: list[asyncio.Task[None]] = []

    def feed(self, event: tenuto.Event) -> None:
        if event.type == "step.started" and event.step is not None:
            kind = event.data["kind"]
            self._kind[event.step] = kind
            if kind in self._nth:
                self._nth[kind] += 1
        for kill in list(self._kills):
            if self._nth[kill.moment] != kill.nth:
                continue
            if kill.moment == "think" and event.type == "model.delta":
                if event.data["offset"] + len(event.data["token_ids"]) >= kill.after:
                    self._kills.remove(kill)
                    self._strike(kill)
            elif kill.moment == "tool" and event.type == "tool.started":
                self._kills.remove(kill)
                self._later.append(asyncio.create_task(self._strike_later(kill)))

    async def settled(self) -> None:
        await asyncio.gather(*self._later)

    async def _strike_later(self, kill: Kill) -> None:
        await asyncio.sleep(kill.after)
        self._strike(kill)

    def _strike(self, kill: Kill) -> None:
        pids = {part: self._stack.signal(part, kill.number) for part in kill.parts if self._stack.pid(part)}
        self._played.killed.append(
            {"moment": kill.describe(), "pids": pids, "signal": signal.Signals(kill.number).name}
        )
        names = ", ".join(f"{part} ({pid})" for part, pid in pids.items())
        self._say(f"kill -{kill.number} {names}, {kill.describe()}")
