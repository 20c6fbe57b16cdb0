from __future__ import annotations

import os
import subprocess
import sys

from bench.quiet import Watch, busy_s, own_s

STAT = "cpu  1000 200 300 9000 50 10 20 30 400 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


def test_the_machine_is_busy_with_everything_but_idling_and_waiting():
    assert busy_s(STAT) == (1000 + 200 + 300 + 10 + 20 + 30) / os.sysconf("SC_CLK_TCK")


def test_a_process_that_has_ended_counts_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert own_s(child.pid) == 0.0


def test_the_time_of_a_process_holds_that_of_its_threads():
    code = "import threading, time\nwhile time.process_time() < 0.3: pass\n"
    code += f"import sys; sys.path.insert(0, {os.getcwd()!r})\nfrom bench.quiet import own_s\nimport os\n"
    code += "work = threading.Thread(target=lambda: [None for _ in iter(lambda: time.process_time() < 0.6, False)])\n"
    code += "work.start(); work.join(); print(own_s(os.getpid()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.5


def test_waiting_ends_when_patience_does():
    watch = Watch([])
    assert watch.wait(0.0) >= 0.0
    assert watch.cores() >= 0.0
