"""Runs an untrusted chat template in a process of its own, under hard limits of time, memory and output.

Run by path, isolated; standard input carries one JSON request, standard output one JSON answer. Imports nothing of
ours.
"""

import json
import resource
import sys
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refusal(Exception):
    """The template itself refused (raise_exception)."""


def _refuse(message: str) -> None:
    raise Refusal(str(message)[:500])


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _render(source: str, jobs: list[dict[str, Any]], limit: int) -> list[str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    template = environment.from_string(source)
    texts = []
    for job in jobs:
        pieces, size = [], 0
        for piece in template.generate(**job):
            size += len(piece)
            if size > limit:
                raise Refusal(f"it wrote more than {limit} characters")
            pieces.append(piece)
        texts.append("".join(pieces))
    return texts


def main() -> None:
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], request["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer: dict[str, Any] = {"texts": _render(request["template"], request["jobs"], request["output_chars"])}
    except MemoryError:
        answer = {"error": "it needs more memory than is allowed"}
    except (Refusal, TemplateError) as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    except Exception as error:  # whatever the template provoked is the template's fault
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
