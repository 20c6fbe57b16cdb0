"""A real S3-compatible server, as a process of its own on a free port of the loopback."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ADDRESS = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # Its log goes on in the same pipe; read away, or the server would stop when the pipe is full.
    drain = threading.Thread(target=process.stderr.read)
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := _ADDRESS.search(line):
                break
        else:
            raise AssertionError("the S3 server did not start: " + "".join(said))
        drain.start()
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
        if drain.is_alive():
            drain.join()
        process.stderr.close()
