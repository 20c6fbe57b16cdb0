"""What may be loaded by those who only look at the face."""

from __future__ import annotations

import subprocess
import sys

import pytest

FACES = [
    "engine",
    "engine.tokens",
    "engine.pages",
    "engine.scheduler",
    "engine.request",
    "engine.client",
    "engine.catalogue",
    "engine.sessions",
    "engine.backends",
    "engine.backends.choose",
    "engine.backends.cpu",
    "engine.launch",
    "engine.native",
    "engine.__main__",
]


@pytest.mark.parametrize("face", FACES)
def test_a_face_loads_no_torch(face: str) -> None:
    heavy = "{'torch', 'transformers', 'asyncpg', 'fastapi', 'temporalio'}"
    code = f"import sys, {face}; bad = {heavy} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_face_is_sorted_and_whole() -> None:
    import engine
    import engine.tokens

    for face in (engine, engine.tokens):
        assert face.__all__ == sorted(face.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        assert all(hasattr(face, name) for name in face.__all__)
