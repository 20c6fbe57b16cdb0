from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import StartupError
from runtime.preflight import check_volumes
from runtime.settings import Settings


def opening(source: Path) -> Settings:
    return Settings.load({"HOME": "/h", "TENUTO_SANDBOX_VOLUMES": f"{source}:/mnt/data"})


def test_a_directory_that_is_to_be_opened_to_tools_must_be_there(tmp_path: Path) -> None:
    check_volumes(opening(tmp_path))
    (tmp_path / "file").touch()
    for missing in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StartupError) as caught:
            check_volumes(opening(missing))
        assert f"TENUTO_SANDBOX_VOLUMES opens {missing} at /mnt/data" in str(caught.value)
