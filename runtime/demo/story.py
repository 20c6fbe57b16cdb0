"""The demo's task: a release engineer with three tools, each of which leaves a mark wherever it runs.

Every tool appends its call key to a counter in the workspace (undone with the workspace) and to one outside it
(which nothing undoes). A call that ran twice stands there twice, whatever our own ledger says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

ROUNDS = 3
THINK_TOKENS = 60
LONG_CALL = 2  # the second call is the long one: its pages reach NVMe

_TOOL = """\
import json, os, sys, time
arguments = json.load(sys.stdin)
key = os.environ["TENUTO_CALL_KEY"]
os.umask(0)  # the session's next sandbox may be another user
with open("/work/calls.log", "a") as inside:
    inside.write(key + "\\n")
with open("/mnt/outside/" + key.split("/")[0] + ".log", "a") as outside:
    outside.write(key + "\\n")
number = sum(1 for _ in open("/work/calls.log"))
time.sleep({long} if number == {which} else {short})
name = sys.argv[1]
subject = " ".join(str(arguments[k]) for k in sorted(arguments))
report = {{
    "run_tests": "14 passed, 1 failed: test_tides (expected 3 tides, got 2)",
    "read_log": "09:14 WARN tide table is older than 30 days; 09:15 INFO served 212 requests",
    "check_config": "tide_table: tides-2024.csv (stale); timeout_s: 30; replicas: 2",
}}[name]
with open("/work/report.txt", "a") as report_file:
    report_file.write(f"{{number}}. {{name}} {{subject}}: {{report}}\\n")
print(f"{{name}} {{subject}}: {{report}}")
"""


def _tool(name: str, description: str, argument: str, choices: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {argument: {"type": "string", "enum": choices}},
            "required": [argument],
            "additionalProperties": False,
        },
        "command": ["python3", "/work/tools/tool.py", name],
        "timeout_s": 60,
    }


TOOLS = [
    _tool("run_tests", "Run one test suite of the project.", "suite", ["unit", "integration", "load"]),
    _tool("read_log", "Read the end of a service's log.", "service", ["api", "worker", "database"]),
    _tool("check_config", "Show the configuration of a service.", "service", ["api", "worker", "database"]),
]
SYSTEM = (
    "You are a release engineer of the project harbour, a small service that answers when the tide comes in. "
    "Use the tools, one at a time, and then say in two sentences what you found."
)
TASK = (
    "Can we release harbour today? First run the unit tests, then read the log of the api, then check the "
    "configuration of the api."
)
QUESTION = "Thank you. Now tell me in one plain English sentence: can we release harbour today?"


def session(seed: int, temperature: float, *, long_s: float = 6.0, short_s: float = 1.5) -> dict[str, Any]:
    """What `sessions.create` takes for the main session."""
    script = _TOOL.format(long=long_s, short=short_s, which=LONG_CALL)
    return {
        "system": SYSTEM,
        "tools": TOOLS,
        "files": {"tools/tool.py": script},
        "limits": {"max_think_tokens": THINK_TOKENS},
        "sampling": {"temperature": temperature},
        "seed": seed,
        "kv": {"on_tool": "nvme"},  # the way that has most to lose
    }


MESSAGE: dict[str, Any] = {"content": TASK, "tool_choice": "required", "max_tool_rounds": ROUNDS}
FOLLOW_UP: dict[str, Any] = {"content": QUESTION, "tool_choice": "none"}


def handbook(tokens: int, salt: int, count: Callable[[str], int]) -> str:
    """A unique system prompt of at least so many tokens, so that the pages of one measurement serve no other."""
    rng = random.Random(salt)
    nouns = "harbour tide pier ferry crane buoy anchor pilot chart signal cargo berth lock quay mast".split()
    verbs = "checks moves records reports clears holds counts logs inspects releases".split()
    lines = [f"Handbook number {salt}. {SYSTEM}"]
    while count("\n".join(lines)) < tokens:
        for _ in range(10):
            lines.append(f"Rule {len(lines)}: the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}.")
    return "\n".join(lines)
