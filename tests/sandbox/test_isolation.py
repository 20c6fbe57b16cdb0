"""What a hostile tool tries, over every driver that isolates."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from sandbox import Call, Driver, Handle, Limits, Sandbox, SandboxBusy, SandboxSpec, Volume, seccomp
from tests.sandbox.conftest import LIMITS, Make, bash, python

pytestmark = pytest.mark.isolated

FORK_BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
FILL_PROCESSES = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    except OSError:
        break
"""
FILL = "f = open({path!r}, 'wb')\nn = 0\ntry:\n  while n < 200: f.write(bytes(1_000_000)); f.flush(); n += 1\n"
FILL += "except OSError as error: print(error.strerror, n)"


async def test_a_fork_bomb_is_stopped_at_its_limit_and_the_agent_lives(sandbox: Sandbox) -> None:
    result = await python(sandbox, FORK_BOMB, timeout_s=1)
    assert result.reason in ("timeout", "oom")
    assert await sandbox.killall() == []
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_a_background_fork_bomb_cannot_keep_the_next_kill_from_working(sandbox: Sandbox) -> None:
    code = f"import subprocess, time\nsubprocess.Popen(['python3', '-c', {FORK_BOMB!r}])\ntime.sleep(0.3)"
    await python(sandbox, code, keep_background=True)
    await sandbox.killall()
    assert await sandbox.killall() == []
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_a_call_for_which_there_is_no_process_left_is_refused_and_its_key_stays_free(
    driver: Driver, sandbox: Sandbox
) -> None:
    if "cgroup" not in str((await driver.describe()).limits_enforced["pids"]):
        pytest.skip("here the limit binds what a tool starts, not the tools themselves")
    await python(sandbox, FILL_PROCESSES, keep_background=True)
    started = []
    with pytest.raises(SandboxBusy, match="process limit"):
        await _start_sleepers(sandbox, started)
    await sandbox.killall()
    free = f"filler-{len(started)}"
    assert (await bash(sandbox, "echo free", key=free)).output == b"free\n"


async def _start_sleepers(sandbox: Sandbox, started: list[Call]) -> None:
    while len(started) < 10:  # the agent's own two places come first
        started.append(await sandbox.start(f"filler-{len(started)}", ["sleep", "1000"]))


@pytest.mark.parametrize(("path", "limit"), [("/work/f", 32), ("/tmp/f", 8), ("/dev/shm/f", 16)])
async def test_a_full_disk_is_an_error_in_the_tool_and_ends_at_its_limit(
    sandbox: Sandbox, path: str, limit: int
) -> None:
    result = await python(sandbox, FILL.format(path=path))
    assert result.output.startswith(b"No space left on device")
    assert int(result.output.split()[-1]) <= limit * 1.05


async def test_files_without_number_are_stopped_with_the_reason_and_can_be_removed(sandbox: Sandbox) -> None:
    code = (
        "import os\nos.mkdir('many')\nn = 0\nwhile n < 300_000:\n  open(f'many/{n}', 'w').close(); n += 1\nprint('all')"
    )
    assert (await python(sandbox, code)).reason == "oom"
    assert (await bash(sandbox, "rm -r many && echo gone", timeout_s=60)).output == b"gone\n"


async def test_nothing_else_of_the_file_system_can_be_written(sandbox: Sandbox) -> None:
    code = """
import os
found = []
for base, folders, files in os.walk("/"):
    mine = ("/proc", "/work", "/tmp", "/dev/shm", "/dev/mqueue")
    folders[:] = [f for f in folders if os.path.join(base, f) not in mine]
    try:
        open(os.path.join(base, "probe"), "w").close()
        found.append(base)
    except OSError:
        pass
print(found)
"""
    assert (await python(sandbox, code)).output == b"[]\n"


async def test_python_compiles_nothing_when_it_starts(sandbox: Sandbox) -> None:
    code = "import asyncio, json, sqlite3, urllib.request, unittest"
    said = (await bash(sandbox, f"python3 -v -c '{code}' 2>&1", output_bytes=4 << 20)).output.decode()
    assert "urllib/__pycache__/request." in said
    # Without byte code it would say "code object from '/usr/lib/...py'"; what is frozen has neither.
    assert [line for line in said.splitlines() if line.startswith("# code object from") and ".pyc" not in line] == []
    assert "wrote" not in said


async def test_kernel_settings_cannot_be_written(sandbox: Sandbox) -> None:
    code = """
import os
opened = []
for base, folders, files in os.walk("/proc/sys"):
    for name in files:
        try:
            os.close(os.open(os.path.join(base, name), os.O_WRONLY))
            opened.append(os.path.join(base, name))
        except OSError:
            pass
for path in ("/proc/sysrq-trigger", "/proc/kcore", "/proc/mem", "/dev/mem", "/sys/kernel/uevent_helper"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        opened.append(path)
    except OSError:
        pass
print(opened)
"""
    assert (await python(sandbox, code)).output == b"[]\n"


async def test_the_host_s_files_processes_and_sockets_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    names = [str(secret), str(Path.home() / ".bashrc"), "/var/run/docker.sock", "/run/docker.sock", "/etc/shadow"]
    code = f"""
import os
print([p for p in {names!r} if os.path.exists(p)], [p for p in os.listdir('/proc') if p == {str(os.getpid())!r}])
"""
    assert (await python(sandbox, code)).output == b"[] []\n"


async def test_nothing_leaves_no_loopback_of_the_host_no_metadata_no_names(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0tenuto-test-abstract")
        abstract.listen()
        code = f"""
import shutil
import socket
reached = []
for address in [("127.0.0.1", {tcp.getsockname()[1]}), ("169.254.169.254", 80), ("8.8.8.8", 53), ("1.1.1.1", 443)]:
    try:
        socket.create_connection(address, 3)
        reached.append(address)
    except OSError:
        pass
try:
    socket.getaddrinfo("example.com", 80)
    reached.append("dns")
except OSError:
    pass
try:
    socket.socket(socket.AF_UNIX).connect("\\0tenuto-test-abstract")
    reached.append("abstract")
except OSError:
    pass
for kind in (socket.SOCK_RAW,):
    try:
        socket.socket(socket.AF_INET, kind, 1)
        reached.append("raw")
    except OSError:
        pass
print(reached)
print(sorted(name for _, name in socket.if_nameindex()))
"""
        said = (await python(sandbox, code)).output.decode().splitlines()
    assert said[0] == "[]"
    assert "lo" in said[1]
    assert "eth" not in said[1]


async def test_a_tool_can_neither_kill_nor_read_nor_trace_its_agent(make: Make) -> None:
    handle, sandbox = await make()
    code = """
import ctypes, os, resource, signal
got = []
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGSEGV):
    os.kill(1, number)
for name in ("environ", "mem", "maps", "fd", "root", "cwd", "exe", "stack", "syscall"):
    path = f"/proc/1/{name}"
    try:
        os.listdir(path) if name in ("fd", "root", "cwd") else open(path, "rb").read(100)
        got.append(name)
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, 1, 0, 0) == 0:
    got.append("ptrace")
try:
    resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
    got.append("prlimit")
except OSError:
    pass
print(got)
"""
    assert (await python(sandbox, code)).output == b"[]\n"
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"
    assert handle.token.encode() not in (await bash(sandbox, "cat /proc/*/cmdline /proc/*/environ; env")).output


async def test_a_tool_cannot_speak_to_the_agent_s_socket(sandbox: Sandbox) -> None:
    code = """
import glob, os, socket
spoke = []
for path in glob.glob("/run/**/*", recursive=True) + ["/run/tenuto/agent.sock"]:
    try:
        s = socket.socket(socket.AF_UNIX); s.settimeout(3); s.connect(path)
        if s.recv(1): spoke.append(path)
    except OSError:
        pass
print(spoke)
"""
    assert (await python(sandbox, code)).output == b"[]\n"
    assert (await bash(sandbox, "rm -rf /run/tenuto/* /run/tenuto; mv /run/tenuto /run/x; echo done")).ok
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_every_denied_system_call_is_denied_and_no_user_namespace_can_be_made(sandbox: Sandbox) -> None:
    column = seccomp.ARCHITECTURES[os.uname().machine][1]
    numbers = {name: pair[column] for name, pair in seccomp.DENIED.items() if pair[column] is not None}
    code = f"""
import ctypes, errno, json
libc = ctypes.CDLL(None, use_errno=True)
answers = {{}}
for name, number in json.loads({json.dumps(json.dumps(numbers))}).items():
    ctypes.set_errno(0)
    answers[name] = [libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno()]
answers["clone3"] = [libc.syscall({seccomp.CLONE3[column]}, 0, 0), ctypes.get_errno()]
answers["userns"] = [libc.syscall({seccomp.CLONE[column]}, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno()]
print(json.dumps(answers))
"""
    answers = json.loads((await python(sandbox, code)).output)
    allowed = {name: answer for name, answer in answers.items() if answer[0] != -1 or answer[1] not in (1, 38)}
    assert allowed == {}


async def test_a_tool_has_no_capability_and_may_gain_none(sandbox: Sandbox) -> None:
    status = (await bash(sandbox, "cat /proc/self/status")).output.decode()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert all(int(facts[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"
    assert facts["Uid"].split()[0] != "0"


async def test_zombies_do_not_pile_up(sandbox: Sandbox) -> None:
    orphans = "for i in $(seq 200); do (true &) ; done"
    for _ in range(3):
        assert (await bash(sandbox, orphans)).ok
    code = "import glob\nstates = [open(p).read().rsplit(')', 1)[1].split()[0] for p in glob.glob('/proc/[0-9]*/stat')]"
    code += "\nprint(states.count('Z'))"
    call = await bash(sandbox, f'while [ "$(python3 -c "{code}")" != 0 ]; do :; done; echo none', timeout_s=20)
    assert call.output == b"none\n"


async def test_a_declared_volume_is_there_read_only_or_not_and_nothing_beside_it(make: Make, home: Path) -> None:
    for name in ("shut", "open"):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(0o777)
        (home / name / "file").write_text(name)
        (home / name / "file").chmod(0o666)
    volumes = (Volume(home / "shut", "/mnt/shut"), Volume(home / "open", "/mnt/open", read_only=False))
    _, sandbox = await make(volumes=volumes)
    result = await bash(sandbox, "cat /mnt/shut/file /mnt/open/file; echo new >/mnt/open/file; echo x >/mnt/shut/file")
    assert result.output.startswith(b"shutopen")
    assert not result.ok
    assert (home / "open" / "file").read_text() == "new\n"
    assert (home / "shut" / "file").read_text() == "shut"
    assert (await bash(sandbox, "ls /mnt; ls /mnt/shut/..")).output.split() == [b"open", b"shut"] * 2


async def test_a_session_goes_on_with_its_own_files_in_a_volume_when_its_sandbox_was_replaced(
    driver: Driver, home: Path
) -> None:
    place = home / "kept"
    place.mkdir()
    place.chmod(0o777)
    volumes = (Volume(place, "/mnt/kept", read_only=False),)
    for name in ("first", "second"):
        handle = await driver.create(SandboxSpec(name, "one-session", "tenant", 1, LIMITS, volumes))
        sandbox = await driver.attach(handle)
        assert (await bash(sandbox, f"echo {name} >> /mnt/kept/log")).ok
        await sandbox.close()
        await driver.release(handle)
    assert (place / "log").read_text() == "first\nsecond\n"
    shutil.rmtree(place)


async def test_two_sandboxes_do_not_see_each_other(make: Make) -> None:
    _, first = await make()
    _, second = await make()
    await bash(first, "echo mine > /work/f; echo mine > /tmp/f; sleep 1000 & disown", keep_background=True)
    assert (await bash(second, "ls /work /tmp; grep -l sleep /proc/*/comm")).output == b"/tmp:\n\n/work:\n"


async def test_cpu_is_limited_where_the_driver_says_so(make: Make, driver_enforces_cpu: bool) -> None:
    if not driver_enforces_cpu:
        pytest.skip("this driver says that it does not limit the CPU")
    _, sandbox = await make(limits=Limits(cpu=0.25))
    code = "import time\nb = time.monotonic(); c = time.process_time()\nwhile time.process_time() - c < 0.2: pass\n"
    result = await python(sandbox, code + "print((time.process_time() - c) / (time.monotonic() - b))")
    assert float(result.output) < 0.6


@pytest.fixture
async def driver_enforces_cpu(driver) -> bool:  # type: ignore[no-untyped-def]
    return (await driver.describe()).limits_enforced["cpu"] is not None


def test_the_limits_under_test_are_not_the_defaults() -> None:
    assert Limits() != LIMITS
    assert issubclass(Handle, object)
