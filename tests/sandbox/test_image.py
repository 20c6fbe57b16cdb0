from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox import CreateFailed, image


@pytest.fixture(scope="module")
def built(home: Path) -> image.Image:
    return image.build(home / "sandbox" / "images")


def test_a_second_build_finds_the_first(home: Path, built: image.Image) -> None:
    images = home / "sandbox" / "images"
    before = built.rootfs.stat().st_ino
    assert image.ready(images) == built
    assert image.build(images) == built
    assert built.rootfs.stat().st_ino == before
    assert list(images.glob("*.part")) == []


def test_a_build_elsewhere_has_the_same_name(built: image.Image, tmp_path: Path) -> None:
    assert image.build(tmp_path).digest == built.digest


def test_another_agent_has_another_image(built: image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "agent"
    changed.mkdir()
    for path in image.AGENT_SOURCE.glob("*.py"):
        (changed / path.name).write_bytes(path.read_bytes() + b"\n# changed\n")
    monkeypatch.setattr(image, "AGENT_SOURCE", changed)
    assert image.ready(built.rootfs.parent) is None
    assert image.build(tmp_path / "images").digest != built.digest


def test_the_image_holds_what_tools_need_and_no_dangling_link(built: image.Image) -> None:
    for name in ("usr/bin/bash", "usr/bin/sh", "usr/bin/python3", "usr/bin/cat", "usr/bin/grep", "etc/passwd", "work"):
        assert (built.rootfs / name).exists(), name
    for base, folders, names in os.walk(built.rootfs):
        for name in [*folders, *names]:
            path = os.path.join(base, name)
            if os.path.islink(path):
                target = os.readlink(path)
                inside = built.rootfs / target.lstrip("/") if target.startswith("/") else Path(base, target)
                assert inside.exists(), path


def test_the_image_has_no_secret_of_the_host_and_nothing_that_changes_its_user(built: image.Image) -> None:
    for base, _, names in os.walk(built.rootfs):
        for name in names:
            mode = os.lstat(os.path.join(base, name)).st_mode
            assert not mode & 0o6000, name
    assert not (built.rootfs / "etc/shadow").exists()
    assert not (built.rootfs / "root").exists()


def test_every_module_of_the_library_and_the_agent_comes_with_byte_code_that_needs_no_check(
    built: image.Image,
) -> None:
    sources = [path for path in built.rootfs.rglob("*.py") if "bad_" not in path.name]
    assert len(sources) > 400
    missing = []
    for path in sources:
        found = list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc"))
        # PEP 552: the second word of the header; 1 says that the source is never looked at.
        if [each.read_bytes()[4:8] for each in found] != [b"\1\0\0\0"]:
            missing.append(str(path))
    assert missing == []


def test_a_build_that_fails_half_way_leaves_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(image.shutil, "copy2", fail)
    with pytest.raises(CreateFailed, match="disk full"):
        image.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
