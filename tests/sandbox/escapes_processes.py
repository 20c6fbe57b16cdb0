"""Attempts on the agent, on other processes, and on what a process may become."""

from __future__ import annotations

from tests.sandbox.escapes import Escape

SURVIVES = "that the agent goes on is looked at after every attempt"
SELF_ONLY = "what is looked for is ours to leave out, not the kernel's to refuse"

ESCAPES = (
    Escape("trace the agent", 'call("ptrace", 0x4206, 1, 0, 0)\nreturn "traced"', "root"),
    *(
        Escape(f"read the agent's {name}", f'return opened(["/proc/1/{name}"]) and "opened"', "root")
        for name in ("mem", "environ", "maps", "stack", "syscall")
    ),
    *(
        Escape(f"look through the agent's {name}", f'return os.listdir("/proc/1/{name}")', "root")
        for name in ("root", "fd", "cwd", "map_files")
    ),
    Escape("write the agent's memory", 'return opened(["/proc/1/mem"], os.O_RDWR)', "root"),
    Escape(
        "write the agent's interpreter (runc CVE-2019-5736)",
        """
        held = os.open("/proc/self/exe", os.O_RDONLY)
        return opened(["/proc/1/exe", "/proc/self/exe", f"/proc/self/fd/{held}", sys.executable], os.O_WRONLY)
        """,
        None,
        "the kernel refuses to write a program that runs (ETXTBSY), whoever asks",
    ),
    Escape(
        "read the agent's memory by process_vm_readv",
        """
        for line in open("/proc/self/maps"):
            at = int(line.split("-")[0], 16)
            break
        local = ctypes.create_string_buffer(8)
        pair = (ctypes.c_uint64 * 2)(ctypes.addressof(local), 8)
        remote = (ctypes.c_uint64 * 2)(at, 8)
        return reached("process_vm_readv", 1, pair, 1, remote, 1, 0)
        """,
        "root",
    ),
    Escape(
        "write the agent's memory by process_vm_writev",
        'return reached("process_vm_writev", 1, None, 0, None, 0, 0)',
        "root",
    ),
    Escape(
        "take a descriptor of the agent",
        """
        pidfd = os.pidfd_open(1)
        return [call("pidfd_getfd", pidfd, number, 0) for number in range(3)]
        """,
        "root",
    ),
    Escape("compare descriptors with the agent", 'return reached("kcmp", 1, 1, 0, 0, 0)', "root"),
    Escape("advise the agent's memory away", 'return reached("process_madvise", -1, None, 0, 0, 0)', "root"),
    Escape("move the agent's pages", 'return reached("move_pages", 1, 0, None, None, None, 0)', "root"),
    Escape("migrate the agent's pages", 'return reached("migrate_pages", 1, 0, None, None)', "root"),
    Escape(
        "kill the agent",
        """
        for number in range(1, 65):
            try:
                os.kill(1, number)
            except OSError:
                pass
        """,
        None,
        SURVIVES,
    ),
    Escape("kill everything that can be seen", "signal.alarm(20)\nos.kill(-1, signal.SIGKILL)", None, SURVIVES),
    Escape(
        "stop everything that can be seen",
        'os.kill(-1, signal.SIGSTOP)\nfor pid in filter(str.isdigit, os.listdir("/proc")):\n'
        "    try:\n        os.kill(int(pid), signal.SIGSTOP)\n    except OSError:\n        pass",
        None,
        SURVIVES,
        timeout_s=2,
    ),
    Escape("limit the agent", 'resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))\nreturn "set"', "root"),
    Escape(
        "make the agent wait for everyone else",
        """
        tried = {
            "nice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
            "nice of its group": lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(1), 19),
            "nice of its user": lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
            "processor": lambda: os.sched_setaffinity(1, {0}),
            "scheduler": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
        }
        got = []
        for name, do in tried.items():
            try:
                do()
                got.append(name)
            except OSError:
                pass
        return got
        """,
        "root",
    ),
    Escape(
        "raise a limit",
        """
        got = []
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_DATA, resource.RLIMIT_CORE):
            soft, hard = resource.getrlimit(which)
            if hard != resource.RLIM_INFINITY:
                try:
                    resource.setrlimit(which, (hard + 1, hard + 1))
                    got.append(which)
                except (OSError, ValueError):
                    pass
        return got
        """,
        None,
        "root may lack the right to it as well, where it is itself in a container",
    ),
    Escape("become root", 'os.setresuid(0, 0, 0)\nreturn f"uid {os.getuid()}"', "root"),
    Escape("join another group", 'os.setgroups([0])\nos.setgid(0)\nreturn f"gid {os.getgid()}"', "root"),
    Escape(
        "take a capability",
        """
        header = struct.pack("Ii", 0x20080522, 0)
        call("capset", header, struct.pack("6I", *[0xFFFFFFFF] * 2, 0, 0xFF, 0xFF, 0))
        return "taken"
        """,
        None,
        "a process that has them all has none to take",
    ),
    Escape(
        "hold a capability",
        'return [line.strip() for line in open("/proc/self/status") if re.match("Cap(Eff|Prm|Bnd):.*[1-9a-f]", line)]',
        "root",
    ),
    Escape(
        "give a file a capability",
        """
        open("/tmp/gifted", "w").close()
        os.setxattr("/tmp/gifted", "security.capability", struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0, 0))
        return "given"
        """,
        "root",
    ),
    Escape(
        "find a program that changes its user",
        """
        got = []
        for base, folders, names in os.walk("/"):
            folders[:] = [name for name in folders if os.path.join(base, name) not in ("/proc", "/sys")]
            for name in names:
                path = os.path.join(base, name)
                try:
                    if os.lstat(path).st_mode & 0o6000 and stat.S_ISREG(os.lstat(path).st_mode):
                        got.append(path)
                except OSError:
                    pass
        return got
        """,
        None,
        SELF_ONLY,
    ),
    Escape(
        "find a descriptor that was left open",
        """
        ours = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2, reader, writer)}
        names = set()
        for number in os.listdir("/proc/self/fd"):
            try:
                names.add(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:
                pass
        return sorted(names - ours - {f"/proc/{os.getpid()}/fd"})
        """,
        None,
        SELF_ONLY,
    ),
    Escape(
        "type into a terminal",
        """
        got = []
        for path in ["/dev/tty", "/dev/console", *glob.glob("/dev/tty[0-9]*"), *glob.glob("/dev/pts/[0-9]*")]:
            try:
                fcntl.ioctl(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK), 0x5412, b"x")
                got.append(path)
            except OSError:
                pass
        return got
        """,
        None,
        "it would type into a terminal of this machine",
    ),
    Escape(
        "shed the system call filter",
        """
        libc.prctl(38, 0, 0, 0, 0)
        libc.prctl(22, 0, 0, 0, 0)
        libc.prctl(22, 2, 0, 0, 0)
        mode = re.search("Seccomp:\\\\s+(\\\\d)", open("/proc/self/status").read())[1]
        return "" if mode == "2" else f"mode {mode}"
        """,
        "root",
    ),
)
