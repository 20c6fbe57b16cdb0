import os
import subprocess
import sys

from engine.temporaries import prefix, sweep


def test_what_a_dead_process_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    left = tmp_path / f".weights-{dead.stdout.decode().strip()}-abc"
    left.write_bytes(b"half")
    folder = tmp_path / ".weights-notapid"
    folder.mkdir()
    living = tmp_path / f"{prefix('weights')}xyz"
    living.write_bytes(b"mine")
    other = tmp_path / f".pull-{os.getpid()}-x"
    other.write_bytes(b"other")
    sweep(tmp_path, "weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name])
