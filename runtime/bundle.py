"""What a support person needs of an installation, as one tar.gz: how it is set up, what the doctor finds, what engines
measure, and the ends of the logs. Nothing of what sessions say, no token ids, no keys and no secrets.

Parts are made of what cannot hold such things; logs, which could, are scrubbed line by line, and whatever is known to
be a secret is taken out of everything at the end.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from runtime.settings import KEYS, Settings
from runtime.tools.redacting import HIDDEN, Redactor

LOG_BYTES: Final = 64 * 2**10  # of each log, its end
_LINE: Final = 400  # characters
_PACKAGES: Final = ("tenuto-server", "torch", "temporalio", "asyncpg", "fastapi", "pydantic", "numpy")
_KEYLIKE: Final = (
    re.compile(r"\b(?:tk|sk|pk|whsec|gh[pousr]|xox[abp])[_-][A-Za-z0-9_\-]{6,}"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # whoever logs in, and by what
    re.compile(r"(?i)(?<=bearer )\S+|(?<=basic )[A-Za-z0-9+/=]{8,}"),
    re.compile(
        r"(?i)(?<=password)(['\"]?\s*[=:]\s*)\S+|(?<=secret)(['\"]?\s*[=:]\s*)\S+|(?<=api_key)(['\"]?\s*[=:]\s*)\S+"
    ),
    re.compile(r"\b[A-Za-z0-9+/]{42,44}={1,2}"),  # 32 bytes in base64
    re.compile(r"\b(?![0-9a-f]{40,}\b)[A-Za-z0-9+_\-]{40,}"),  # what is long and random, and no digest
)
_SAID: Final = (
    re.compile(r"(?<=input_value=).*?(?=, input_type|$)"),
    re.compile(r"(?<=\[)\s*-?\d+(?:\s*,\s*-?\d+){5,}\s*(?=\])"),  # token ids
    re.compile(r"'[^']{60,}'|\"[^\"]{60,}\""),
)
_WITH_ROWS: Final = ("DETAIL:", "STATEMENT:", "CONTEXT:", "QUERY:", "HINT:")  # of Postgres: they quote rows
WHAT: Final[Mapping[str, str]] = {
    "versions.json": "of Tenuto, of Python, of this system, and of the packages that matter",
    "settings.json": "settings by name; secret ones only as set",
    "migrations.json": "the schema's migrations that were applied",
    "counts.json": "how much there is of everything",
    "nodes.json": "nodes, their states, models and pools",
    "findings.json": "what the doctor finds in each part of each node, and what it rules out",
    "engines.json": "what engines measure, what their time went into lately, and their memory",
    "deaths.json": "how processes last ended, other than by being stopped",
}


class Scrubber:
    """`values`: secrets that are known."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._known = Redactor(values)

    def value(self, value: Any) -> Any:
        """Without any known secret, and without what looks like a key."""
        return self._known.json(_each(value))

    def line(self, line: str) -> str | None:
        """Of a log; None where it may quote rows."""
        if any(word in line for word in _WITH_ROWS):
            return None
        for pattern in _SAID:
            line = pattern.sub("…", line)
        return self._known.text(_without_keys(line))[:_LINE]

    def log(self, path: Path) -> str:
        """The end of a log. A file that cannot be read is empty."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        kept = (self.line(line) for line in lines[1:] if not line.startswith("\t"))
        return "".join(f"{line}\n" for line in kept if line is not None)


def _without_keys(text: str) -> str:
    for pattern in _KEYLIKE:
        text = pattern.sub(HIDDEN, text)
    return text


def _each(value: Any) -> Any:
    if isinstance(value, str):
        return _without_keys(value)
    if isinstance(value, Mapping):
        return {name: _each(one) for name, one in value.items()}
    return [_each(one) for one in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: version(name) for name in _PACKAGES},
    }


def shown(settings: Settings) -> dict[str, str]:
    """Settings by name, those that are secret only as set."""
    found = settings.environment()
    return {name: "(set)" if KEYS[name].secret else text for name, text in found.items()}


def secret_values(settings: Settings) -> list[str]:
    """What this process knows and must not tell."""
    found = settings.environment()
    values = [text for name, text in found.items() if KEYS[name].secret]
    values += [urlsplit(text).password or "" for text in values if "://" in text]
    for path in (settings.admin_key_path, settings.secrets_key_path):
        try:
            values.append(path.read_text().strip())
        except OSError:
            continue
    return values


def logs(settings: Settings, scrubber: Scrubber) -> dict[str, str]:
    """The ends of the logs of this home, scrubbed."""
    return {path.stem: scrubber.log(path) for path in sorted(settings.logs_dir.glob("*.log"))}


def packed(parts: Mapping[str, Any], log_texts: Mapping[str, str], missing: Mapping[str, str]) -> bytes:
    """A tar.gz of `parts` (JSON by file name; see WHAT) and logs, with a manifest of what is in it and what is not."""
    files = {name: json.dumps(part, indent=1).encode() + b"\n" for name, part in parts.items()}
    files |= {f"logs/{name}.log": text.encode() for name, text in log_texts.items()}
    manifest = {
        "files": [_entry(name, data) for name, data in files.items()],
        "missing": dict(missing),
        "never": "what sessions say, token ids, keys, secrets",
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in (("manifest.json", json.dumps(manifest, indent=1).encode() + b"\n"), *files.items()):
            member = tarfile.TarInfo(f"tenuto-bundle/{name}")
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    what = WHAT.get(name, "the end of a log, scrubbed")
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "what": what}


def members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What a bundle holds, for who reads one."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield member.name, file.read()
