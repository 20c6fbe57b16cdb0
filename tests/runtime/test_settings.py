from __future__ import annotations

from pathlib import Path

import pytest

from engine.tokens import FORMATS
from runtime.settings import GIB, KEYS, External, Machine, Settings, SettingsError, parse_size
from sandbox import Volume

USER = Machine(uid=1000, ram_bytes=64 * GIB, shm=Path("/dev/shm"))
ROOT = Machine(uid=0, ram_bytes=64 * GIB, shm=Path("/dev/shm"))
ENV = {"HOME": "/home/ada"}


def load(machine: Machine = USER, /, **given: str) -> Settings:
    return Settings.load({**ENV, **given}, machine=machine)


def test_defaults_follow_the_xdg_directories_of_a_user() -> None:
    settings = load()
    assert settings.home == Path("/home/ada/.local/share/tenuto")
    assert settings.models_dir == Path("/home/ada/.cache/tenuto/models")
    given = load(XDG_DATA_HOME="/data", XDG_CACHE_HOME="/cache", XDG_RUNTIME_DIR="/run/user/1000")
    assert given.home == Path("/data/tenuto")
    assert given.models_dir == Path("/cache/tenuto/models")
    assert given.run_dir.parent == Path("/run/user/1000")


def test_root_lives_in_var_lib_and_run() -> None:
    settings = load(ROOT)
    assert settings.home == Path("/var/lib/tenuto")
    assert settings.run_dir.parent == Path("/run")


def test_two_homes_have_run_directories_and_arenas_of_their_own() -> None:
    one, two = load(TENUTO_HOME="/a"), load(TENUTO_HOME="/b")
    assert one.run_dir != two.run_dir
    assert one.host_arena != two.host_arena
    assert one.run_dir == load(TENUTO_HOME="/a").run_dir


def test_socket_paths_are_short_whatever_the_home_is() -> None:
    for machine in (USER, ROOT):
        settings = load(machine, TENUTO_HOME="/x" * 100, XDG_RUNTIME_DIR="/long" * 30)
        assert len(str(settings.engine_socket)) < 60
        assert len(str(settings.postgres_run_dir / ".s.PGSQL.5432.lock")) < 100


def test_the_host_tier_takes_no_more_than_an_eighth_of_the_memory() -> None:
    assert load().host_kv_bytes == GIB
    assert load(Machine(1000, 2 * GIB, None)).host_kv_bytes == GIB // 4


def test_the_host_tier_takes_no_more_than_half_of_a_small_shared_memory() -> None:
    assert load(Machine(1000, 64 * GIB, Path("/dev/shm"), shm_bytes=64 * 2**20)).host_kv_bytes == 32 * 2**20


def test_without_shared_memory_the_arena_is_in_the_run_directory() -> None:
    settings = load(Machine(1000, GIB, None))
    assert settings.host_arena.is_relative_to(settings.run_dir)


def test_the_command_line_wins_over_the_environment() -> None:
    env = {**ENV, "TENUTO_MODEL": "one", "TENUTO_API_PORT": "1"}
    settings = Settings.load(env, {"TENUTO_MODEL": "two", "TENUTO_API_PORT": None}, machine=USER)
    assert (settings.model, settings.api_port) == ("two", 1)


def test_an_empty_value_is_no_value() -> None:
    assert load(TENUTO_POSTGRES_DSN="", TENUTO_API_PORT=" ").postgres_dsn is None


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 * 2**20), ("4G", 4 * GIB), ("1.5gib", 3 * GIB // 2), ("4096", 4096), ("0", 0)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_volumes_are_read() -> None:
    settings = load(TENUTO_SANDBOX_VOLUMES="/srv/a:/mnt/a, /srv/b:/mnt/b:ro")
    assert settings.sandbox_volumes == (
        Volume(Path("/srv/a"), "/mnt/a", read_only=False),
        Volume(Path("/srv/b"), "/mnt/b", read_only=True),
    )


def test_images_are_names_with_their_tags_or_any() -> None:
    assert load(TENUTO_SANDBOX_IMAGES="busybox, gcr.io/a/b:1").sandbox_images == ("busybox:latest", "gcr.io/a/b:1")
    assert load(TENUTO_SANDBOX_IMAGES="*").sandbox_images == ("*",)
    assert load().sandbox_images == ()
    with pytest.raises(SettingsError, match="no name of an image"):
        load(TENUTO_SANDBOX_IMAGES="--privileged")


def test_a_model_is_a_name_or_a_path() -> None:
    assert load(TENUTO_MODEL="smollm2-135m-instruct").model == "smollm2-135m-instruct"
    assert load(TENUTO_MODEL="x.gguf").model == str(Path.cwd() / "x.gguf")
    assert load(TENUTO_MODEL="/models/../m/x.gguf").model == "/m/x.gguf"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://api.example.com/v1", "http://[::1]:1"])
def test_a_model_may_be_a_servers(url: str) -> None:
    assert load(TENUTO_MODEL=f"openai:{url}/#org/m").external == External(url, "org/m")
    assert load(TENUTO_MODEL=f"openai:{url}").external == External(url, None)
    assert load(TENUTO_MODEL="x.gguf").external is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "ftp://h",
        "http://",
        "http://u:p@h/v1",
        "http://h:x/v1",
        "http://h:0",
        "http://h:99999",
        "http://h/v1?key=1",
        "http://h /v1",
        "http://[",
    ],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="TENUTO_MODEL is"):
        load(TENUTO_MODEL=f"openai:{text}")


def test_the_key_of_a_server_is_shown_nowhere() -> None:
    assert "sk-x" not in repr(load(TENUTO_OPENAI_KEY="sk-x"))
    with pytest.raises(SettingsError) as refused:
        load(TENUTO_OPENAI_KEY="sk x")
    assert "sk x" not in str(refused.value)


def test_a_hugging_face_directory_is_a_path_even_without_a_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen3-0.6B", "smollm2-135m-instruct"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert load(TENUTO_MODEL="Qwen3-0.6B").model == str(tmp_path / "Qwen3-0.6B")
    assert load(TENUTO_MODEL="smollm2-135m-instruct").model == "smollm2-135m-instruct"


FULL = {
    "TENUTO_HOME": "/srv/tenuto",
    "TENUTO_MODELS": "/srv/models",
    "TENUTO_MODEL": "/srv/x.gguf",
    "TENUTO_OPENAI_KEY": "sk-x",
    "TENUTO_OPENAI_KIND": "vllm",
    "TENUTO_OPENAI_CONTEXT": "8192",
    "TENUTO_OPENAI_CONNECT_S": "2.5",
    "TENUTO_OPENAI_FIRST_S": "20.0",
    "TENUTO_OPENAI_BETWEEN_S": "5.0",
    "TENUTO_POSTGRES_DSN": "postgresql://u@/d?host=/run/x",
    "TENUTO_TEMPORAL_ADDRESS": "temporal:7233",
    "TENUTO_TEMPORAL_NAMESPACE": "agents",
    "TENUTO_API_HOST": "::1",
    "TENUTO_API_PORT": "0",
    "TENUTO_API_URL": "https://api.example",
    "TENUTO_API_KEY": "tk_x",
    "TENUTO_ENGINE_ADDRESS": "/run/x/engine.sock",
    "TENUTO_ENGINE_THREADS": "3",
    "TENUTO_ENGINE_DTYPE": "fp32",
    "TENUTO_ENGINE_BACKEND": "cpu",
    "TENUTO_KV_DTYPE": "e4m3",
    "TENUTO_KV_TOKENS": "4096",
    "TENUTO_HOST_KV_BYTES": "64M",
    "TENUTO_NVME_KV_BYTES": "1G",
    "TENUTO_KV_COMPRESSION": "zstd",
    "TENUTO_KV_ENCRYPTION": "on",
    "TENUTO_SPECULATION": "off",
    "TENUTO_DRAFT_MODEL": "/models/small.gguf",
    "TENUTO_CALL_FORMAT": "mistral-named",
    "TENUTO_KV_DECISIONS": "/var/log/kv.jsonl",
    "TENUTO_SHARED_KV": "s3://bucket/prefix",
    "TENUTO_SHARED_KV_BYTES": "3GiB",
    "TENUTO_SANDBOX": "docker",
    "TENUTO_SANDBOX_VOLUMES": "/srv/a:/mnt/a,/srv/b:/mnt/b:ro",
    "TENUTO_SANDBOX_IMAGES": "python:3.12-slim,busybox:latest",
    "TENUTO_SANDBOX_PULL": "missing",
    "TENUTO_SECRETS_KEY": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
    "TENUTO_SANDBOX_COLD_START_S": "0.25",
    "TENUTO_SANDBOX_SPARES": "7",
    "TENUTO_SANDBOX_IDLE_S": "90.0",
    "TENUTO_SANDBOX_EGRESS_ALLOW": "api.example.org:443",
    "TENUTO_EGRESS_ALLOW": "example.org,*.example.org:8443,[::1]:80",
    "TENUTO_NODES": "2",
    "TENUTO_WORKERS": "3",
    "TENUTO_RETENTION_DAYS": "7.5",
    "TENUTO_PRICES": "/etc/tenuto/prices.json",
    "TENUTO_NODE_ID": "node-7",
    "TENUTO_LOG_LEVEL": "debug",
}


def test_every_key_is_known_and_survives_the_way_to_a_child() -> None:
    assert FULL.keys() == KEYS.keys()
    for given in ({}, FULL, {"TENUTO_SANDBOX": "auto"}):
        settings = load(**given)
        assert load(**settings.environment()) == settings


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("TENUTO_MODLE", "did you mean TENUTO_MODEL?"),
        ("TENUTO_API_PROT", "did you mean TENUTO_API_PORT?"),
        ("TENUTO_QQQQQQQQQQQQQQQQ", "--help"),
    ],
)
def test_an_unknown_key_fails_by_name_with_the_nearest_known_one(key: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**{key: ""})
    assert key in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("TENUTO_API_PORT", "eighty"),
        ("TENUTO_API_PORT", "65536"),
        ("TENUTO_HOST_KV_BYTES", "lots"),
        ("TENUTO_HOST_KV_BYTES", "-1"),
        ("TENUTO_ENGINE_DTYPE", "int3"),
        ("TENUTO_KV_DTYPE", "int8"),
        ("TENUTO_ENGINE_BACKEND", "tpu"),
        ("TENUTO_ENGINE_THREADS", "0"),
        ("TENUTO_KV_TOKENS", "1"),
        ("TENUTO_KV_COMPRESSION", "lz77"),
        ("TENUTO_KV_ENCRYPTION", "rot13"),
        ("TENUTO_KV_DECISIONS", "here.jsonl"),
        ("TENUTO_DRAFT_MODEL", "small.gguf"),
        ("TENUTO_SPECULATION", "ratio"),
        ("TENUTO_CALL_FORMAT", "qwen"),
        ("TENUTO_SHARED_KV", "relative/place"),
        ("TENUTO_SHARED_KV", "s3://"),
        ("TENUTO_TEMPORAL_ADDRESS", "localhost"),
        ("TENUTO_ENGINE_ADDRESS", "engine.sock"),
        ("TENUTO_SANDBOX", "chroot"),
        ("TENUTO_SANDBOX_VOLUMES", "/only-one"),
        ("TENUTO_SANDBOX_EGRESS_ALLOW", "*"),
        ("TENUTO_EGRESS_ALLOW", "https://example.org"),
        ("TENUTO_SANDBOX_VOLUMES", "/a:/mnt/a:rx"),
        ("TENUTO_SANDBOX_VOLUMES", "relative:/mnt/a"),
        ("TENUTO_SANDBOX_VOLUMES", "/a:/etc"),
        ("TENUTO_SANDBOX_VOLUMES", "/a:/mnt/a,/b:/mnt/a:ro"),
        ("TENUTO_NODE_ID", "Node 1"),
        ("TENUTO_LOG_LEVEL", "loud"),
        ("TENUTO_API_URL", "ftp://x"),
    ],
)
def test_a_bad_value_is_refused_in_a_sentence_that_names_the_key(key: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**{key: text})
    assert str(caught.value).startswith(f"{key} is {text!r}; ")


@pytest.mark.parametrize(("key", "text"), [("TENUTO_API_KEY", "tk a"), ("TENUTO_POSTGRES_DSN", "mysql://u:pw@h/d")])
def test_a_secret_is_shown_neither_in_an_error_nor_in_a_log(key: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(**{key: text})
    assert key in str(caught.value)
    assert text not in str(caught.value)
    shown = repr(load(TENUTO_API_KEY="tk_secret", TENUTO_POSTGRES_DSN="postgresql://u:secret@h/d"))
    assert "secret" not in shown


def test_every_format_of_calls_can_be_named():
    for kind in FORMATS:
        assert Settings.load({"HOME": "/tmp", "TENUTO_CALL_FORMAT": kind.name}).call_format == kind.name
