"""What the workflow asks of a node: activity names with their frozen inputs and outputs.

`runtime/steps.py` implements these under the same names. Temporal carries references only: ids, step numbers,
phases. Everything of any size lies in Postgres.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SESSIONS_QUEUE = "sessions"
NODES_QUEUE = "nodes"

PLACE = "place"
TAKE_INPUT = "take_input"
THINK = "think"
RUN_TOOLS = "run_tools"
COMPACT = "compact"
INTERRUPT = "interrupt"
APPLY = "apply"
FAIL = "fail"
FINISH = "finish"
SEND_WEBHOOK = "send_webhook"
FIRE = "fire"
LOOK_AT_RUN = "look_at_run"
CANCEL_RUN = "cancel_run"
ALTER = "alter"
ERRAND = "errand"


class ErrorType:
    """`ApplicationError.type` of what an activity raises. All but REFUSED are answered by a new placement, and so is
    any error that nobody raised on purpose."""

    ENGINE_LOST = "EngineLost"
    SANDBOX_LOST = "SandboxLost"
    STALE_EPOCH = "StaleEpoch"
    DRAINING = "Draining"
    DISK_FULL = "DiskFull"  # somebody may be making room
    REFUSED = "Refused"  # the request itself is at fault: the session fails with its message


def workflow_id(session_id: str) -> str:
    return f"session/{session_id}"


def errand_workflow_id(errand_id: str) -> str:
    return f"errand/{errand_id}"


def node_queue(node_id: str, boot: str) -> str:
    return f"node-{node_id}-{boot}"


@dataclass(frozen=True)
class PlaceIn:
    session_id: str
    lost: str = ""  # the queue of the node that has just lost a step, if one has
    known: int = 0  # the epoch of the last placement that was heard of, 0 for none: a later one is not made again


@dataclass(frozen=True)
class Progress:
    """Where the record stands: enough to decide what comes next, after any crash."""

    step_no: int = 0  # the last step that ended, 0 for none
    kind: str = ""  # input, think, tool; or failed: it ended without a checkpoint, and the session rests
    outcome: str = ""  # of a think: final, tools, incomplete; of whatever was stopped by its user: interrupted
    rounds: int = 0  # tool rounds since the last input
    tool_choice: str = "auto"  # of the last input: auto, none, required or a tool's name
    max_tool_rounds: int = 0
    hold: str = ""  # nothing runs while it is set: paused, failed, what the session waits for, or how it has ended
    hold_until: float = 0.0  # seconds since the epoch at which the wait expires; 0: never
    hold_left_s: float = 0.0  # how long that was when it was read, by the record's clock; 0: a node that does not say
    full: bool = False  # the context must be compacted before the next think
    compacted: bool = False  # it has just been, or could not be
    corrections: int = 0  # thinks since the last input whose calls could not be read
    unread: int = 0  # accepted messages that no step has taken


@dataclass(frozen=True)
class Placement:
    """A session's home: the queue of the node that holds its KV and sandbox, and the epoch of this ownership. One that
    has ended has none."""

    node_id: str
    queue: str
    epoch: int
    progress: Progress


@dataclass(frozen=True)
class StepIn:
    session_id: str
    epoch: int
    step_no: int


@dataclass(frozen=True)
class InputIn:
    session_id: str
    epoch: int
    step_no: int
    message_id: str


@dataclass(frozen=True)
class ThinkIn:
    session_id: str
    epoch: int
    step_no: int
    tool_choice: str
    corrections: int = 0


@dataclass(frozen=True)
class StepOut:
    progress: Progress
    moved: bool = False  # the session was taken back to another checkpoint: whoever held it must be fenced off
    interrupt: bool = False  # what would run next is to be ended instead
    alters: bool = False  # of APPLY: a change of the workspace is next; of ALTER: more commands wait behind it


@dataclass(frozen=True)
class ApplyIn:
    """Apply the commands that the record holds, and expire what waited too long."""

    session_id: str
    gave_up: str = ""  # why the change of the workspace that is next cannot be made, at no node


@dataclass(frozen=True)
class FinishIn:
    session_id: str
    how: str  # cancelled or completed


@dataclass(frozen=True)
class FailIn:
    session_id: str
    message: str


@dataclass(frozen=True)
class DeliveryIn:
    """One round of a webhook's delivery: a replay is another."""

    delivery_id: str
    round: int


@dataclass(frozen=True)
class DeliveryOut:
    wait_s: float  # until the next try; 0: there is none


@dataclass(frozen=True)
class FiringIn:
    """One firing of a schedule; its name is the id of the workflow that Temporal started for it."""

    schedule_id: str
    firing: str = ""


@dataclass(frozen=True)
class RunOut:
    over: bool


def delivery_workflow_id(what: DeliveryIn) -> str:
    return f"webhook/{what.delivery_id}/{what.round}"


@dataclass(frozen=True)
class ErrandIn:
    """What only a node can do. `errand_id` names the row that says what is asked; `session_id` is empty where that is
    about no session."""

    session_id: str
    errand_id: str
    queue: str
    within_s: float


@dataclass
class SessionState:
    """Everything of a session that must survive continue-as-new."""

    session_id: str
    placement: Placement | None = None
    progress: Progress = field(default_factory=Progress)
    inbox: list[str] = field(default_factory=list)  # message ids
    seen: list[str] = field(default_factory=list)  # the most recent ids, so that a repeated delivery is a no-op
    ending: str = ""  # "", cancelled or completed
    failed: bool = False  # kept for runs that an earlier release began
    updates: int = 0  # in this run
    max_events: int = 1500  # continue as new beyond this many history events
    commands: list[str] = field(default_factory=list)  # ids of commands that are to be applied
    interrupt: bool = False  # what runs is to be ended as interrupted, before anything else
    wake_at: float = 0.0  # when to ask whether the wait has expired, by the workflow's clock; 0: when it does
    alters: bool = False  # a change of the workspace waits in the record
