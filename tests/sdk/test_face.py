"""What the package shows, what it needs, and how it finds its server."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tenuto


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No server, no key and no installation but what the test makes."""
    for name in ("TENUTO_API_URL", "TENUTO_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENUTO_HOME", str(tmp_path))
    return tmp_path


def test_exported_names_are_sorted_and_exist() -> None:
    assert tenuto.__all__ == sorted(tenuto.__all__)
    public = {name for name, value in vars(tenuto).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(tenuto.__all__)


def faces() -> list[tuple[type, type]]:
    """Every class of the blocking client with its twin, those that hang at a client or a session included."""
    blocking, other = tenuto.Client(api_key="k"), tenuto.AsyncClient(api_key="k")
    pairs = [(tenuto.Client, tenuto.AsyncClient), (tenuto.Session, tenuto.AsyncSession)]
    pairs += [(tenuto.RunningTurn, tenuto.AsyncRunningTurn)]
    pairs += [(type(tenuto.Session(blocking, "x").files), type(tenuto.AsyncSession(other, "x").files))]
    pairs += [(type(one), type(vars(other)[name])) for name, one in vars(blocking).items() if name[0] != "_"]
    return pairs


def calls(face: type) -> dict[str, str]:
    """Public methods of a class with their signatures, but for what they return."""
    members = inspect.getmembers(face, lambda one: inspect.isfunction(one) or isinstance(one, property))
    return {
        name: "" if isinstance(one, property) else str(inspect.signature(one).replace(return_annotation=None))
        for name, one in members
        if name[0] != "_"
    }


def test_exported_names_and_their_methods_are_documented() -> None:
    shown = [getattr(tenuto, name) for name in tenuto.__all__] + [face for pair in faces() for face in pair]
    bare = [face.__name__ for face in shown if not (face.__doc__ or "").strip()]
    for face in (one for one in shown if inspect.isclass(one)):
        members = {name: value for name, value in vars(face).items() if name[0] != "_"}
        bare += [
            f"{face.__name__}.{name}"
            for name, value in members.items()
            if (inspect.isfunction(value) or isinstance(value, property)) and not value.__doc__
        ]
    assert bare == []


def test_both_clients_have_the_same_calls() -> None:
    assert len(faces()) > 10
    for one, other in faces():
        assert calls(one) == calls(other), one


def test_both_clients_say_the_same_of_each_call() -> None:
    """But for what is awaited."""

    def plain(text: str | None) -> str:
        words = re.sub(r"(?s)```.*?```", "", text or "")  # examples differ
        words = re.sub(r"\b(async|await) |; it may be async", "", words)
        return " ".join(words.replace("Async", "").split())

    for one, other in faces():
        for name in calls(one):
            assert plain(getattr(one, name).__doc__) == plain(getattr(other, name).__doc__), (one, name)


def test_the_package_loads_nothing_of_the_server() -> None:
    ours = ("runtime", "engine", "sandbox", "kvtier", "workflows", "migrations", "torch", "numpy", "asyncpg", "fastapi")
    code = f"import sys, tenuto; print(sorted(set({ours!r}) & {{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_key_there_is_a_sentence() -> None:
    with pytest.raises(tenuto.TenutoError, match="there is no API key: pass api_key=, or set TENUTO_API_KEY"):
        tenuto.Client()


def test_an_address_without_a_scheme_is_a_sentence() -> None:
    with pytest.raises(tenuto.TenutoError, match="'localhost:8300' is no address"):
        tenuto.AsyncClient("localhost:8300", "k")


def server_of(client: tenuto.Client) -> tuple[str, str]:
    with client:
        return client._server.url, client._server.key


def test_a_local_installation_is_found_where_it_listens(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "admin.key").write_text("tk_local\n")
    assert server_of(tenuto.Client()) == ("http://127.0.0.1:8300", "tk_local")
    (elsewhere / "up.json").write_text(json.dumps({"api_url": None}))
    assert server_of(tenuto.Client()) == ("http://127.0.0.1:8300", "tk_local")
    (elsewhere / "up.json").write_text(json.dumps({"api_url": "http://127.0.0.1:41"}))
    assert server_of(tenuto.Client()) == ("http://127.0.0.1:41", "tk_local")
    monkeypatch.setenv("TENUTO_API_URL", "http://there:1/")
    monkeypatch.setenv("TENUTO_API_KEY", "tk_env")
    assert server_of(tenuto.Client()) == ("http://there:1", "tk_env")
    assert server_of(tenuto.Client("https://given", "tk_given")) == ("https://given", "tk_given")
