"""Configuration: read once, here, into one frozen value. Nothing else in the house looks at the environment.

Sources, the later one winning: defaults, TENUTO_* variables, overrides (the command line). `KEYS` lists every key;
one that is not in it fails by name.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from runtime.errors import StartupError, TenutoError
from runtime.sealing import parse_key
from sandbox import SandboxUsageError, Volume
from sandbox.allow import Entry, parse_allow
from sandbox.spec import canonical

GIB: Final = 2**30
EXTERNAL: Final = "openai:"
DEFAULT_MODEL: Final = "qwen2.5-coder-0.5b-instruct"
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SettingsError(TenutoError):
    """A setting that is unknown or cannot be; the message names the key and says what it may be."""


@dataclass(frozen=True)
class Machine:
    """What defaults depend on."""

    uid: int
    ram_bytes: int
    shm: Path | None
    shm_bytes: int = 2**63  # of the whole file system

    @classmethod
    def present(cls) -> Machine:
        shm = Path("/dev/shm")
        usable = shm.is_dir() and os.access(shm, os.W_OK | os.X_OK)
        ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not usable:
            return cls(os.geteuid(), ram_bytes, None)
        return cls(os.geteuid(), ram_bytes, shm, shutil.disk_usage(shm).total)


@dataclass(frozen=True)
class External:
    """A model server: the address of its API, and which of its models, None for the only one."""

    url: str
    model: str | None

    @classmethod
    def parse(cls, text: str) -> External:
        """Of `openai:URL` or `openai:URL#MODEL`. Raises ValueError with what it may be."""
        url, _, model = text.removeprefix(EXTERNAL).partition("#")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query
        if wrong or parts.username is not None or not url.isprintable() or " " in url or not model.isprintable():
            raise ValueError(
                "use openai:http://HOST:PORT/v1, with #MODEL where the server has several, and no key in it"
            )
        return cls(url.rstrip("/"), model or None)


@dataclass(frozen=True)
class Settings:
    """What was asked for, and after `tenuto up` resolved it, what is. Sizes in bytes, times in seconds.

    `postgres_dsn`, `temporal_address` and `engine_address` are None until something is given or started; `sandbox` is
    None where the best that the machine has is to be used, `api_port` where the usual one is, or another if that is
    taken.
    """

    home: Path
    models_dir: Path
    run_dir: Path
    arena_dir: Path
    model: str
    host_kv_bytes: int
    openai_key: str | None = field(default=None, repr=False)
    openai_kind: str = "auto"
    openai_context: int | None = None
    openai_connect_s: float = 10.0
    openai_first_s: float = 300.0
    openai_between_s: float = 60.0
    postgres_dsn: str | None = field(default=None, repr=False)
    temporal_address: str | None = None
    temporal_namespace: str = "default"
    api_host: str = "127.0.0.1"
    api_port: int | None = None
    api_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    secrets_key: str | None = field(default=None, repr=False)
    engine_address: str | None = None
    engine_threads: int | None = None
    engine_dtype: str = "bf16"
    engine_backend: str = "auto"
    kv_dtype: str = "auto"
    kv_tokens: int = 16384
    nvme_kv_bytes: int = 4 * GIB
    kv_decisions: str | None = None
    draft_model: str | None = None
    call_format: str = "auto"
    kv_compression: str = "off"
    kv_encryption: str = "off"
    speculation: str = "auto"
    shared_kv: str | None = None
    shared_kv_bytes: int = 16 * GIB
    sandbox: str | None = None
    sandbox_volumes: tuple[Volume, ...] = ()
    sandbox_images: tuple[str, ...] = ()
    sandbox_pull: str = "never"
    sandbox_cold_start_s: float = 0.1
    sandbox_spares: int = 4
    sandbox_idle_s: float = 60.0
    sandbox_egress_allow: tuple[Entry, ...] = ()
    egress_allow: tuple[Entry, ...] = ()
    nodes: int = 1
    workers: int = 1
    retention_days: float = 30.0
    prices: Path | None = None
    node_id: str = "node-1"
    log_level: str = "info"

    @classmethod
    def load(
        cls,
        env: Mapping[str, str] | None = None,
        overrides: Mapping[str, str | None] | None = None,
        *,
        machine: Machine | None = None,
    ) -> Settings:
        """Reads TENUTO_* keys of both mappings, and HOME and XDG_* of `env`; `env` is the process's where not given.

        An empty value counts as not given, and an override of None as none. Raises SettingsError.
        """
        env = os.environ if env is None else env
        machine = machine or Machine.present()
        given = {key: value for key, value in env.items() if key.startswith("TENUTO_")}
        given |= {key: value for key, value in (overrides or {}).items() if value is not None}
        values = {KEYS[key].field: KEYS[key].read(key, text) for key, text in _known(given).items()}
        home = values.setdefault("home", _default_home(env, machine))
        tag = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]
        run_dir = _run_dir(env, machine, tag)
        values.setdefault("models_dir", _base(env, "XDG_CACHE_HOME", ".cache") / "tenuto" / "models")
        values.setdefault("model", DEFAULT_MODEL)
        values.setdefault("host_kv_bytes", min(GIB, machine.ram_bytes // 8, machine.shm_bytes // 2))
        arena_dir = run_dir / "arena" if machine.shm is None else machine.shm / f"tenuto-{tag}"
        return cls(run_dir=run_dir, arena_dir=arena_dir, **values)

    def environment(self) -> dict[str, str]:
        """TENUTO_* variables from which a child process (with the same HOME and XDG_*) loads an equal value."""
        shown = {key: one.show(getattr(self, one.field)) for key, one in KEYS.items()}
        return {key: text for key, text in shown.items() if text}

    # --- derived -------------------------------------------------------------------------------------------------

    @property
    def postgres_dsn_required(self) -> str:
        return _required(self.postgres_dsn, "TENUTO_POSTGRES_DSN", "a Postgres")

    @property
    def temporal_address_required(self) -> str:
        return _required(self.temporal_address, "TENUTO_TEMPORAL_ADDRESS", "a Temporal")

    @property
    def engine_address_required(self) -> str:
        return _required(self.engine_address, "TENUTO_ENGINE_ADDRESS", "an engine")

    @property
    def model_path(self) -> Path:
        """The model's file or directory. Raises engine.ModelError with a sentence where it is unknown or not pulled."""
        from engine.catalogue import resolve

        return resolve(self.model, self.models_dir)

    @property
    def external(self) -> External | None:
        """The model server that runs the model, where that is none of ours."""
        return External.parse(self.model) if self.model.startswith(EXTERNAL) else None

    @property
    def openai_key_path(self) -> Path:
        """Where the engine process finds the model server's key: neither its arguments nor its environment show it."""
        return self.run_dir / "openai.key"

    @property
    def postgres_dir(self) -> Path:
        return self.home / "postgres"

    @property
    def postgres_run_dir(self) -> Path:
        """Beside `run_dir`, not in it: under root it belongs to the account that Postgres runs as."""
        return self.run_dir.with_name(self.run_dir.name + "-pg")

    @property
    def temporal_dir(self) -> Path:
        return self.home / "temporal"

    @property
    def logs_dir(self) -> Path:
        return self.home / "logs"

    @property
    def blobs_dir(self) -> Path:
        return self.home / "blobs"

    @property
    def kv_dir(self) -> Path:
        """The NVMe tier."""
        return self.home / "kv"

    @property
    def shared_kv_dir(self) -> Path:
        """The shared store of an installation with several nodes that was not given one."""
        return self.home / "shared-kv"

    @property
    def blobs_lock_path(self) -> Path:
        return self.home / "blobs.lock"

    @property
    def host_arena(self) -> Path:
        return self.arena_dir / "kv"

    @property
    def engine_socket(self) -> Path:
        return self.run_dir / "engine.sock"

    @property
    def engine_target(self) -> str:
        """Where the engine answers: the one that was named, or that of the stack that runs here."""
        return self.engine_address or str(self.engine_socket)

    @property
    def state_path(self) -> Path:
        return self.home / "up.json"

    @property
    def lock_path(self) -> Path:
        return self.home / "up.lock"

    @property
    def admin_key_path(self) -> Path:
        return self.home / "admin.key"

    @property
    def admin_key(self) -> str:
        """The first key, which `tenuto up` makes. Raises StartupError where there is none yet."""
        try:
            return self.admin_key_path.read_text().strip()
        except OSError as error:
            raise StartupError(
                f"{self.admin_key_path} cannot be read ({error.strerror}); `tenuto up` makes it"
            ) from error

    @property
    def secrets_key_path(self) -> Path:
        return self.home / "secrets.key"

    @property
    def secrets_key_bytes(self) -> bytes:
        """The key that secrets are sealed with, which api and nodes share. Raises StartupError."""
        if self.secrets_key is not None:
            return parse_key(self.secrets_key)
        try:
            return parse_key(self.secrets_key_path.read_text())
        except OSError as error:
            raise StartupError(
                f"TENUTO_SECRETS_KEY is not set and {self.secrets_key_path} cannot be read ({error.strerror});"
                " `tenuto up` makes it, and every process of an installation needs the same one"
            ) from error
        except ValueError as error:
            raise StartupError(f"{self.secrets_key_path} holds no key: {error}") from error


# --- one value -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """How the text of a key becomes the value of a field. `parse` raises ValueError with what the value may be.

    A secret is not shown in errors: they end up in logs.
    """

    field: str
    parse: Callable[[str], Any]
    secret: bool = False

    def read(self, key: str, text: str) -> Any:
        try:
            return self.parse(text.strip())
        except (ValueError, SandboxUsageError) as error:
            shown = "not usable" if self.secret else repr(text)
            raise SettingsError(f"{key} is {shown}; {error}") from None

    def show(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, tuple):
            return ",".join(_shown(one) for one in value)
        return str(value)


def _shown(one: Volume | Entry | str) -> str:
    if isinstance(one, Volume):
        return f"{one.source}:{one.target}{':ro' if one.read_only else ''}"
    return str(one)


def _path(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        path = Path.cwd() / path
    return Path(os.path.normpath(path))


def _model(text: str) -> str:
    """A name stays a name; a path becomes absolute, since processes start in other directories."""
    if text.startswith(EXTERNAL):
        External.parse(text)
        return text
    from engine.catalogue import models

    is_path = "/" in text or text.endswith(".gguf") or (_path(text) / "config.json").is_file()
    return str(_path(text)) if is_path and text not in {entry.name for entry in models()} else text


def parse_size(text: str) -> int:
    """Bytes from `512M`, `4G`, `1.5GiB` or a plain number; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.upper())
    if not found:
        raise ValueError("use a size such as 512M, 4G, or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def _number(kind: type[int] | type[float], least: float, most: float, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"use {what}") from None
        if not least <= value <= most:
            raise ValueError(f"use {what}")
        return value

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"use one of {', '.join(choices)}")
        return text.lower()

    return parse


def _sandbox(text: str) -> str | None:
    choice = _one_of("auto", "docker", "bubblewrap")(text)
    return None if choice == "auto" else choice


def _matching(pattern: str, what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"use {what}")
        return text

    return parse


def _volumes(text: str) -> tuple[Volume, ...]:
    volumes = tuple(_volume(one.strip()) for one in text.split(",") if one.strip())
    targets = [volume.target for volume in volumes]
    if twice := next((target for target in targets if targets.count(target) > 1), None):
        raise ValueError(f"{twice} stands twice; give each directory a name of its own")
    return volumes


def _images(text: str) -> tuple[str, ...]:
    names = tuple(one.strip() for one in text.split(",") if one.strip())
    return tuple(name if name == ANY_IMAGE else canonical(name) for name in names)


def _volume(text: str) -> Volume:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise ValueError("use /path/here:/path/in/the/sandbox, with :ro for read-only, separated by commas")
    return Volume(Path(source), target, read_only=mode == "ro")


def _secrets_key(text: str) -> str:
    parse_key(text)
    return text


ANY_IMAGE: Final = "*"
_HOST_PORT: Final = r"[A-Za-z0-9_.\-\[\]:]*[A-Za-z0-9_.\-\]]:\d{1,5}"

KEYS: Final[Mapping[str, Key]] = {
    "TENUTO_HOME": Key("home", _path),
    "TENUTO_MODELS": Key("models_dir", _path),
    "TENUTO_MODEL": Key("model", _model),
    "TENUTO_OPENAI_KEY": Key(
        "openai_key", _matching(r"[!-~]{1,4096}", "a key of printable ASCII without spaces"), True
    ),
    "TENUTO_OPENAI_KIND": Key(
        "openai_kind", _one_of("auto", "vllm", "sglang", "llamacpp", "openai", "tenuto", "plain")
    ),
    "TENUTO_OPENAI_CONTEXT": Key("openai_context", _number(int, 64, 2**31 - 1, "a number of tokens, at least 64")),
    "TENUTO_OPENAI_CONNECT_S": Key("openai_connect_s", _number(float, 0.1, 3600, "seconds, from 0.1 to 3600")),
    "TENUTO_OPENAI_FIRST_S": Key("openai_first_s", _number(float, 0.1, 86_400, "seconds, from 0.1 to 86400")),
    "TENUTO_OPENAI_BETWEEN_S": Key("openai_between_s", _number(float, 0.1, 86_400, "seconds, from 0.1 to 86400")),
    "TENUTO_POSTGRES_DSN": Key(
        "postgres_dsn", _matching(r"postgres(ql)?://\S+", "postgresql://user@host/database"), True
    ),
    "TENUTO_TEMPORAL_ADDRESS": Key("temporal_address", _matching(_HOST_PORT, "host:port")),
    "TENUTO_TEMPORAL_NAMESPACE": Key("temporal_namespace", _matching(r"[\w.-]{1,128}", "letters, digits, - and .")),
    "TENUTO_API_HOST": Key("api_host", _matching(r"[\w.:-]+", "a host name or an address")),
    "TENUTO_API_PORT": Key("api_port", _number(int, 0, 65535, "a port, or 0 for a free one")),
    "TENUTO_API_URL": Key("api_url", _matching(r"https?://\S+", "an http:// or https:// address")),
    "TENUTO_API_KEY": Key("api_key", _matching(r"\S+", "a key without spaces"), True),
    "TENUTO_SECRETS_KEY": Key("secrets_key", _secrets_key, True),
    "TENUTO_ENGINE_ADDRESS": Key(
        "engine_address", _matching(rf"/\S+|{_HOST_PORT}", "the path of a unix socket, or host:port")
    ),
    "TENUTO_ENGINE_THREADS": Key("engine_threads", _number(int, 1, 1024, "a number of threads from 1 to 1024")),
    "TENUTO_ENGINE_DTYPE": Key("engine_dtype", _one_of("bf16", "fp32", "w4a8", "w4a16", "w8a16", "w8a8")),
    "TENUTO_ENGINE_BACKEND": Key("engine_backend", _one_of("auto", "triton", "cpu", "torch")),
    "TENUTO_KV_DTYPE": Key("kv_dtype", _one_of("auto", "e4m3")),
    "TENUTO_KV_TOKENS": Key("kv_tokens", _number(int, 64, 2**31, "a number of tokens, at least 64")),
    "TENUTO_HOST_KV_BYTES": Key("host_kv_bytes", parse_size),
    "TENUTO_NVME_KV_BYTES": Key("nvme_kv_bytes", parse_size),
    "TENUTO_KV_COMPRESSION": Key("kv_compression", _one_of("off", "zlib", "zstd")),
    "TENUTO_KV_ENCRYPTION": Key("kv_encryption", _one_of("off", "on")),
    "TENUTO_SPECULATION": Key("speculation", _one_of("auto", "off")),
    "TENUTO_DRAFT_MODEL": Key("draft_model", _matching(r"/\S+", "the absolute path of a model")),
    "TENUTO_CALL_FORMAT": Key("call_format", _one_of("auto", "hermes", "llama3", "mistral", "mistral-named")),
    "TENUTO_KV_DECISIONS": Key("kv_decisions", _matching(r"/\S+", "the absolute path of a file")),
    "TENUTO_SHARED_KV": Key(
        "shared_kv", _matching(r"/\S+|s3://[\w.-]+(/\S*)?", "an absolute directory, or s3://BUCKET/PREFIX")
    ),
    "TENUTO_SHARED_KV_BYTES": Key("shared_kv_bytes", parse_size),
    "TENUTO_SANDBOX": Key("sandbox", _sandbox),
    "TENUTO_SANDBOX_VOLUMES": Key("sandbox_volumes", _volumes),
    "TENUTO_SANDBOX_IMAGES": Key("sandbox_images", _images),
    "TENUTO_SANDBOX_PULL": Key("sandbox_pull", _one_of("never", "missing")),
    "TENUTO_SANDBOX_COLD_START_S": Key("sandbox_cold_start_s", _number(float, 0, 3600, "seconds, from 0 to 3600")),
    "TENUTO_SANDBOX_SPARES": Key("sandbox_spares", _number(int, 0, 64, "a number of sandboxes from 0 to 64")),
    "TENUTO_SANDBOX_IDLE_S": Key("sandbox_idle_s", _number(float, 1, 86_400, "seconds, from 1 to 86400")),
    "TENUTO_SANDBOX_EGRESS_ALLOW": Key("sandbox_egress_allow", parse_allow),
    "TENUTO_EGRESS_ALLOW": Key("egress_allow", parse_allow),
    "TENUTO_NODES": Key("nodes", _number(int, 1, 16, "a number of nodes from 1 to 16")),
    "TENUTO_WORKERS": Key("workers", _number(int, 1, 16, "a number of workers from 1 to 16")),
    "TENUTO_RETENTION_DAYS": Key("retention_days", _number(float, 0.01, 36_500, "a number of days, at least 0.01")),
    "TENUTO_PRICES": Key("prices", _path),
    "TENUTO_NODE_ID": Key("node_id", _matching(r"[a-z0-9][a-z0-9-]{0,31}", "up to 32 of a-z, 0-9 and -")),
    "TENUTO_LOG_LEVEL": Key("log_level", _one_of("debug", "info", "warning", "error")),
}
assert {one.field for one in KEYS.values()} == {one.name for one in fields(Settings)} - {"run_dir", "arena_dir"}


# --- defaults ------------------------------------------------------------------------------------------------------


def ensure_spelt() -> None:
    """Raises SettingsError where a TENUTO_* variable of this process is none of ours."""
    _known({key: text for key, text in os.environ.items() if key.startswith("TENUTO_")})


def _known(given: Mapping[str, str]) -> dict[str, str]:
    """Keys with a value. An unknown one fails even when empty: it is a misspelt one."""
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "see `tenuto up --help`"
            raise SettingsError(f"{key} is no setting of Tenuto; {hint}")
    return {key: text for key, text in given.items() if text.strip()}


def _base(env: Mapping[str, str], variable: str, below_home: str) -> Path:
    """An XDG directory; the standard says that a relative one is to be ignored."""
    given = env.get(variable, "")
    if given.startswith("/"):
        return Path(given)
    return Path(env.get("HOME") or Path.home()) / below_home


def _default_home(env: Mapping[str, str], machine: Machine) -> Path:
    if machine.uid == 0:
        return Path("/var/lib/tenuto")
    return _base(env, "XDG_DATA_HOME", ".local/share") / "tenuto"


def _run_dir(env: Mapping[str, str], machine: Machine, tag: str) -> Path:
    """Short, since the path of a unix socket has at most 107 bytes."""
    if machine.uid == 0:
        return Path(f"/run/tenuto-{tag}")
    given = env.get("XDG_RUNTIME_DIR", "")
    if given.startswith("/") and len(given) < 60:
        return Path(given) / f"tenuto-{tag}"
    return Path(f"/tmp/tenuto-{machine.uid}-{tag}")


def _required(value: str | None, key: str, what: str) -> str:
    if value is None:
        raise StartupError(f"{key} is not set; give {what}, or let `tenuto up` start everything")
    return value
