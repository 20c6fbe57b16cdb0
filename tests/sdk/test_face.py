"""What the package shows, what it needs, and how it finds its server."""

from __future__ import annotations

import inspect
import json
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


def test_exported_names_and_their_methods_are_documented() -> None:
    faces = [getattr(tenuto, name) for name in tenuto.__all__]
    faces += [type(tenuto.Client(api_key="k").sessions), type(tenuto.AsyncClient(api_key="k").sessions)]
    bare = [face.__name__ for face in faces if not (face.__doc__ or "").strip()]
    for face in faces:
        members = {name: value for name, value in vars(face).items() if name[0] != "_"}
        bare += [
            f"{face.__name__}.{name}"
            for name, value in members.items()
            if (inspect.isfunction(value) or isinstance(value, property)) and not value.__doc__
        ]
    assert bare == []


def test_both_clients_have_the_same_calls() -> None:
    for one, other in ((tenuto.Client, tenuto.AsyncClient), (tenuto.Session, tenuto.AsyncSession)):
        calls = [
            {name: str(inspect.signature(value).replace(return_annotation=inspect.Signature.empty))}
            for face in (one, other)
            for name, value in sorted(vars(face).items())
            if name[0] != "_" and inspect.isfunction(value)
        ]
        assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]


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
