"""Renders untrusted chat templates by way of `render_child.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.errors import TemplateError

MAX_TEMPLATE_CHARS = 65_536
MAX_OUTPUT_CHARS = 1_048_576
_CPU_S = 2
_WALL_S = 20.0  # a loaded machine may need seconds merely to start the child
_MEMORY_BYTES = 512 * 1024 * 1024
_CHILD = Path(__file__).with_name("render_child.py")


def render(template: str, jobs: list[dict[str, Any]]) -> list[str]:
    """One text per job (the template's variables). Blocking, ~100 ms. Raises TemplateError in a sentence."""
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the chat template has {len(template)} characters; {MAX_TEMPLATE_CHARS} are allowed")
    request = {
        "template": template,
        "jobs": jobs,
        "cpu_s": _CPU_S,
        "memory_bytes": _MEMORY_BYTES,
        "output_chars": MAX_OUTPUT_CHARS,
    }
    answer = _ask(json.dumps(request))
    if "error" in answer:
        raise TemplateError(f"the chat template cannot be used: {answer['error']}")
    texts = answer.get("texts")
    if not isinstance(texts, list) or len(texts) != len(jobs):
        raise TemplateError("the chat template cannot be used: its renderer gave no answer")
    return texts


def _ask(request: str) -> dict[str, Any]:
    command = [sys.executable, "-I", str(_CHILD)]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, encoding="utf-8", timeout=_WALL_S, check=False, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateError(f"the chat template did not finish within {_WALL_S:.0f} s") from error
    if done.returncode:
        raise TemplateError(f"the chat template used more than {_CPU_S} s of processor time or too much memory")
    answer = json.loads(done.stdout)
    if not isinstance(answer, dict):
        raise TemplateError("the chat template cannot be used: its renderer gave no answer")
    return answer
