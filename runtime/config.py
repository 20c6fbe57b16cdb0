"""What a session is made of: validated at the edge, frozen in its row, read by the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from runtime.agents import AGENT
from runtime.generation import ResponseFormat, Sampling
from runtime.text import fault
from runtime.tools.kinds import AnyTool, Declared, Frozen, McpTool, SessionTool, with_values
from sandbox import TOOLS
from sandbox.allow import Entry
from sandbox.spec import canonical

MAX_SERVERS = 8
_CHOICES = ("auto", "none", "required")  # of tool_choice, beside a tool's name


Metadata = dict[
    Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")],
    Annotated[str, Field(max_length=512)],
]


class Body(Frozen):
    """The body of a request: its text can be kept as it is."""

    @model_validator(mode="before")
    @classmethod
    def _text_can_be_kept(cls, value: Any) -> Any:
        if found := fault(value):
            raise ValueError(found)
        return value


class Limits(Frozen):
    max_think_tokens: int = Field(default=512, ge=1, le=32768)
    tool_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    tool_output_bytes: int = Field(default=16_384, ge=256, le=262_144)
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20, le=16 << 30)
    workspace_bytes: int = Field(default=256 << 20, ge=1 << 20, le=16 << 30)
    pids: int = Field(default=256, ge=16, le=4096)


class KvPolicy(Frozen):
    """Where the session's pages wait while a tool runs. `auto`: copied at once to the tier that the policy chooses, by
    how long such tools take; freed when others need their place. Who may find them: every session of the tenant,
    or this one alone."""

    on_tool: Literal["auto", "pin", "host", "nvme", "drop"] = "auto"
    share: Literal["tenant", "session"] = "tenant"


class Approval(Frozen):
    """A call of the tool waits for a person's word; without one by the deadline it is declined."""

    deadline_s: float | None = Field(default=None, gt=0, le=31_536_000)


class BudgetLimits(Frozen):
    """What may be used in all; None: any amount."""

    tokens: int | None = Field(default=None, ge=1, lt=2**53)  # sampled
    steps: int | None = Field(default=None, ge=1, lt=2**31)
    wall_s: float | None = Field(default=None, gt=0, lt=2**31)  # thinking and running tools
    tool_s: float | None = Field(default=None, gt=0, lt=2**31)


class Budget(BudgetLimits):
    """The session's. At `warn_at` of a limit it says so, at the limit it waits for more."""

    warn_at: float = Field(default=0.8, gt=0, le=1)


def _host(value: object) -> Entry:
    if isinstance(value, Entry):
        return value
    if not isinstance(value, str):
        raise ValueError("give each host as a text")
    return Entry.parse(value)


Host = Annotated[Entry, BeforeValidator(_host), PlainSerializer(str), WithJsonSchema({"type": "string"})]
OnBusy = Literal["reject", "enqueue", "interrupt"]


class SessionConfig(Frozen):
    model: str = Field(min_length=1, max_length=200)
    system: str | None = Field(default=None, max_length=200_000)
    tools: list[Declared] = Field(default_factory=list, max_length=64)
    files: dict[str, str] = Field(default_factory=dict)
    image: str | None = Field(default=None, max_length=255)  # of the sandbox; None: the built-in one
    egress: list[Host] = Field(default_factory=list, max_length=64)  # what the sandbox may reach; empty: nothing
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    response_format: ResponseFormat | None = None  # of what is not a call; None: any text
    parallel_tool_calls: bool | None = None  # several calls in a message; None: where tool_choice is auto
    kv: KvPolicy = KvPolicy()
    approvals: dict[str, Approval] = Field(default_factory=dict, max_length=65)  # by a tool's name, or * for all
    budget: Budget = Budget()
    on_busy: OnBusy = "enqueue"  # what a message does that comes while the session works
    context_policy: Literal["fail", "drop_tool_output", "summarise"] = "fail"  # what gives way in a full context

    @field_validator("image")
    @classmethod
    def _names_an_image(cls, value: str | None) -> str | None:
        return None if value is None else canonical(value)

    @field_validator("tools")
    @classmethod
    def _known_and_distinct(cls, value: list[str | AnyTool]) -> list[str | AnyTool]:
        names = [tool if isinstance(tool, str) else tool.name for tool in value]
        for tool in value:
            if isinstance(tool, str) and tool not in TOOLS:
                raise ValueError(f"{tool!r} is no built-in tool; there are {', '.join(TOOLS)}, or give a command")
        for tool in value:
            if not isinstance(tool, str) and tool.name in TOOLS:
                raise ValueError(f"{tool.name!r} is the name of a built-in tool; give yours another")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tool names must differ; {', '.join(sorted(twice))} stands twice")
        servers = [tool.name for tool in value if isinstance(tool, McpTool)]
        if taken := [name for name in names if name.partition("__")[0] in servers and "__" in name]:
            raise ValueError(f"{taken[0]!r} could be the name of a tool of the server {taken[0].partition('__')[0]!r}")
        if len(servers) > MAX_SERVERS:
            raise ValueError(f"a session has at most {MAX_SERVERS} MCP servers")
        return value

    @property
    def is_partial(self) -> bool:
        """Whether some of it is said elsewhere."""
        return False

    @model_validator(mode="after")
    def _answers_can_be_whole(self) -> Self:
        if self.sampling.stop and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("sampling.stop: an answer that a text can end may not have its response_format; use one")
        return self

    @model_validator(mode="after")
    def _approvals_name_tools(self) -> Self:
        if self.is_partial:
            return self
        named = {name for name in self.approvals if not any(name.startswith(one.full_name("")) for one in self.servers)}
        if unknown := sorted(named - {"*", *self.tool_names}):
            raise ValueError(f"approvals: {unknown[0]!r} is no tool of this session; use a tool's name, or *")
        return self

    @model_validator(mode="after")
    def _children_can_be_made(self) -> Self:
        for tool in self.declared:
            if isinstance(tool, SessionTool):
                try:
                    self.of_child(tool)
                except ValidationError as error:
                    raise ValueError(f"the session of {tool.name!r}: {error.errors()[0]['msg']}") from None
        return self

    def of_child(self, tool: SessionTool) -> SessionConfig:
        """What a session is made of that runs as this session's tool. Raises ValidationError."""
        return SessionConfig(
            model=self.model or "any",
            system=tool.system,
            tools=tool.tools,
            image=self.image,
            egress=self.egress,
            limits=self.limits,
            sampling=self.sampling,
            kv=self.kv,
            context_policy=self.context_policy,
        )

    def for_turn(self, turn: Mapping[str, Any] | None) -> SessionConfig:
        """With what a message says for its turn (`TurnOptions`, as they are kept)."""
        if not turn:
            return self
        said = TurnOptions.model_validate(turn)
        changed = {
            name: value
            for name in ("sampling", "response_format", "parallel_tool_calls")
            if (value := getattr(said, name)) is not None
        }
        if said.max_think_tokens is not None:
            changed["limits"] = self.limits.model_copy(update={"max_think_tokens": said.max_think_tokens})
        return self.model_copy(update=changed)

    def approval_of(self, tool: str) -> Approval | None:
        """What a call of this tool needs first; None: nothing."""
        of_server = next((one.full_name("*") for one in self.servers if tool.startswith(one.full_name(""))), tool)
        return self.approvals.get(tool) or self.approvals.get(of_server) or self.approvals.get("*")

    @property
    def declared(self) -> list[AnyTool]:
        """The tools that are not built in."""
        return [tool for tool in self.tools if not isinstance(tool, str)]

    @property
    def servers(self) -> list[McpTool]:
        return [tool for tool in self.declared if isinstance(tool, McpTool)]

    @property
    def tool_names(self) -> list[str]:
        """As they can be called; what a server offers is known later, and stands here as `name__*`."""
        return [
            tool if isinstance(tool, str) else tool.full_name("*") if isinstance(tool, McpTool) else tool.name
            for tool in self.tools
        ]


class Said(Frozen):
    """A part of a conversation that was held elsewhere."""

    type: Literal["said"] = "said"
    role: Literal["user", "assistant"]
    text: str = Field(max_length=1_000_000)


class Called(Frozen):
    """A call that a model made; what follows its message are results."""

    type: Literal["called"]
    call_id: str = Field(min_length=1, max_length=200)
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    arguments: dict[str, Any] = Field(default_factory=dict)


class Result(Frozen):
    """What a call gave back."""

    type: Literal["result"]
    call_id: str = Field(min_length=1, max_length=200)
    name: str = Field(default="", max_length=64)
    output: str = Field(max_length=1_000_000)


Item = Annotated[Said | Called | Result, Field(discriminator="type")]


class TurnOptions(Frozen):
    """What holds for a turn, in place of what the session says."""

    sampling: Sampling | None = None
    response_format: ResponseFormat | None = None
    max_think_tokens: int | None = Field(default=None, ge=1, le=32768)
    parallel_tool_calls: bool | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class MessageIn(Body):
    """A message to a session. `tool_choice` holds for `max_tool_rounds` thinks, the last answer is without tools.
    `items`: a conversation that was held elsewhere, in place of `content`."""

    content: str = Field(default="", max_length=1_000_000)
    items: list[Item] = Field(default_factory=list, max_length=10_000)
    tool_choice: str = Field(default="auto", min_length=1, max_length=200)
    max_tool_rounds: int = Field(default=8, ge=0, le=1000)
    on_busy: OnBusy | None = None  # None: as the session says
    options: TurnOptions | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if bool(self.content) == bool(self.items):
            raise ValueError("content: a message has content, or items in place of it")
        return self

    @property
    def text(self) -> str:
        """What people are shown of it."""
        said = [item.text for item in self.items if isinstance(item, Said) and item.role == "user"]
        return self.content or (said[-1] if said else "")

    @property
    def all_text(self) -> str:
        """What the model reads of it, nearly."""
        return self.content or "\n".join(_text_of(item) for item in self.items)

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept beside its text."""
        kept: dict[str, Any] = {"tool_choice": self.tool_choice, "max_tool_rounds": self.max_tool_rounds}
        if self.items:
            kept["items"] = [item.model_dump() for item in self.items]
        if self.options is not None:
            kept["turn"] = self.options.model_dump(exclude_none=True)
        return kept

    def check_against(self, config: SessionConfig) -> None:
        """Raises ValueError where the choice names no tool of the session."""
        if self.tool_choice in ("auto", "none"):
            return
        if not config.tools:
            raise ValueError(f"tool_choice is {self.tool_choice!r}, but the session has no tools")
        of_a_server = any(self.tool_choice.startswith(server.full_name("")) for server in config.servers)
        if self.tool_choice != "required" and self.tool_choice not in config.tool_names and not of_a_server:
            raise ValueError(
                f"tool_choice is {self.tool_choice!r}; use auto, none, required or one of"
                f" {', '.join(config.tool_names)}"
            )


def _text_of(item: Item) -> str:
    if isinstance(item, Said):
        return item.text
    return item.output if isinstance(item, Result) else f"{item.name} {json.dumps(item.arguments)}"


def _ensure_choices(config: SessionConfig) -> None:
    """Raises ValueError where a tool has a name that tool_choice takes for another thing, here or in sessions that are
    tools of this one, or where such a session's own tool_choice names nothing of it."""
    for tool in config.declared:
        if tool.name in _CHOICES:
            raise ValueError(f"tools: {tool.name!r} is what tool_choice says; give the tool another name")
        if isinstance(tool, SessionTool):
            child = config.of_child(tool)
            try:
                MessageIn(content="x", tool_choice=tool.tool_choice).check_against(child)
            except ValueError as error:
                raise ValueError(f"tools: {tool.name}: {error}") from None
            _ensure_choices(child)


class Wanted(SessionConfig):
    """What a session is wanted to be made of."""

    model: str = Field(default="", max_length=200)  # empty: the model that the engine serves

    @model_validator(mode="after")
    def _files_fit(self) -> Wanted:
        size = sum(len(text.encode()) for text in self.files.values())
        if size > self.limits.workspace_bytes // 2:
            raise ValueError(
                f"files: {size} bytes do not leave half of the workspace free ({self.limits.workspace_bytes} bytes);"
                " raise limits.workspace_bytes"
            )
        if sum(len(text) for text in self.files.values()) > 4 << 20:
            raise ValueError("files must not exceed 4 MiB together; upload more after the session exists")
        return self

    def config(self, model: str) -> SessionConfig:
        fields = set(SessionConfig.model_fields)
        return SessionConfig(**{**self.model_dump(include=fields), "model": model})


class Given(Wanted, Body):
    """The same as a request says it."""

    @model_validator(mode="after")
    def _names_can_be_chosen(self) -> Given:
        """Asked of what is new only: sessions that an earlier release took must go on."""
        _ensure_choices(self)
        return self

    @model_validator(mode="after")
    def _nothing_is_sealed(self) -> Given:
        """What is sealed comes out of the record, and never in."""

        def look(value: Any) -> Any:
            if isinstance(value, Mapping) and "sealed" in value:
                raise ValueError('tools: give a value as a text, or as {"secret": "NAME"}')
            return value

        for tool in self.model_dump(include={"tools"})["tools"]:
            with_values(tool, look)
        return self


class SessionIn(Given):
    """The body of POST /v1/sessions: the configuration, and optionally a seed. With an `agent` (`name`, or `name@3`),
    what is not said here is as its version says; of limits, sampling, kv, budget, files and approvals member by member.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"system": "You are brief.", "tools": ["bash"], "limits": {"max_think_tokens": 200}, "seed": 7},
                {"tools": ["python"], "approvals": {"python": {"deadline_s": 3600}}, "budget": {"tokens": 100_000}},
            ]
        }
    )

    agent: str | None = Field(default=None, pattern=AGENT, max_length=80)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    metadata: Metadata = Field(default_factory=dict, max_length=16)

    @property
    def is_partial(self) -> bool:
        return self.agent is not None
