"""Attempts on the kernel: settings, devices, control groups, and system calls that no tool needs."""

from __future__ import annotations

from tests.sandbox.escapes import Escape

NO_SUCH_KERNEL = "this kernel may have been built without it"

ESCAPES = (
    *(
        Escape(f"write {path}", f"return opened([{path!r}], os.O_WRONLY)", "root")
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/panic_on_oops",
            "/proc/sys/kernel/shmmax",
        )
    ),
    *(
        Escape(f"write {path}", f"return opened([{path!r}], os.O_WRONLY)", None, NO_SUCH_KERNEL)
        for path in (
            "/proc/sys/kernel/modprobe",
            "/proc/sys/fs/binfmt_misc/register",
            "/proc/sysrq-trigger",
            "/sys/kernel/uevent_helper",
        )
    ),
    Escape(
        "write any setting of the kernel",
        """
        paths = [os.path.join(base, name) for base, _, names in os.walk("/proc/sys") for name in names]
        return opened(paths, os.O_WRONLY)[:5]
        """,
        "root",
    ),
    Escape(
        "write anything in /sys",
        """
        paths = [os.path.join(base, name) for base, _, names in os.walk("/sys") for name in names]
        return [path for path in paths if os.access(path, os.W_OK) and opened([path], os.O_WRONLY)][:5]
        """,
        None,
        "opening some of those files does something",
    ),
    Escape(
        "read the kernel's memory",
        'return opened(["/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"])',
        None,
        NO_SUCH_KERNEL,
    ),
    Escape("read the kernel's log", 'return reached("syslog", 10, None, 0)', "root"),
    Escape("read the kernel's log as a file", 'return opened(["/dev/kmsg", "/proc/kmsg"])', "root"),
    Escape(
        "read where the kernel's symbols are",
        """
        with open("/proc/kallsyms") as f:
            return [line for line in f if not line.startswith("0" * 16)][:1]
        """,
        "root",
    ),
    Escape(
        "set a release agent",
        'return opened(glob.glob("/sys/fs/cgroup/**/release_agent", recursive=True), os.O_WRONLY)',
        "root",
    ),
    Escape(
        "mount the control groups",
        """
        for kind, options in ((b"cgroup", b"memory"), (b"cgroup2", None)):
            try:
                call("mount", b"none", b"/tmp", kind, 0, options)
                return "mounted"
            except OSError:
                pass
        """,
        "root",
    ),
    Escape(
        "raise the limits of its control group",
        """
        names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us", "cgroup.procs")
        paths = [path for name in names for path in glob.glob(f"/sys/fs/cgroup/**/{name}", recursive=True)]
        return opened(paths, os.O_WRONLY)[:5]
        """,
        "root",
    ),
    Escape(
        "make a device by its number",
        """
        major, minor = os.major(HOST["disk"]), os.minor(HOST["disk"])
        got = []
        for kind, device in ((stat.S_IFBLK, (major, minor)), (stat.S_IFBLK, (7, 0)), (stat.S_IFCHR, (1, 1))):
            for folder in ("/work", "/tmp", "/dev/shm"):
                path = f"{folder}/device-{device[0]}-{device[1]}"
                try:
                    os.mknod(path, kind | 0o600, os.makedev(*device))
                    os.close(os.open(path, os.O_RDONLY))
                    got.append(path)
                except OSError:
                    pass
                finally:
                    if os.path.exists(path):
                        os.unlink(path)
        return got
        """,
        "root",
    ),
    Escape(
        "open a device that no tool needs",
        """
        names = ("loop-control", "net/tun", "kvm", "fuse", "btrfs-control", "vsock", "vhost-net", "loop0", "vda", "sda")
        return opened([f"/dev/{name}" for name in names])
        """,
        "root",
    ),
    Escape(
        "find a device that no tool needs",
        """
        known = "null zero full random urandom tty console ptmx pts shm mqueue fd stdin stdout stderr core".split()
        return sorted(set(os.listdir("/dev")) - set(known))
        """,
        "root",
    ),
    Escape("io_uring", 'return reached("io_uring_setup", 1, ctypes.create_string_buffer(120))', None, NO_SUCH_KERNEL),
    Escape("bpf", 'return reached("bpf", 0, ctypes.create_string_buffer(72), 72)', "root"),
    Escape("perf_event_open", 'return reached("perf_event_open", None, 0, -1, -1, 0)', None, NO_SUCH_KERNEL),
    Escape("userfaultfd", 'return reached("userfaultfd", 1)', None, NO_SUCH_KERNEL),
    Escape("the keyring of the session", 'return reached("keyctl", 0, -3, 1)', "root"),
    Escape("add a key", 'return reached("add_key", b"user", b"tenuto", b"x", 1, -2)', "root"),
    Escape("request a key", 'return reached("request_key", b"user", b"tenuto-none", None, 0)', "root"),
    Escape("load a kernel", 'return reached("kexec_load", 0, 0, None, 0xFFFF)', None, NO_SUCH_KERNEL),
    Escape("load a module", 'return reached("finit_module", -1, b"", 0)', None, NO_SUCH_KERNEL),
    Escape("load a module from memory", 'return reached("init_module", None, 0, b"")', None, NO_SUCH_KERNEL),
    Escape("remove a module", 'return reached("delete_module", b"tenuto_none", 0o4000)', None, NO_SUCH_KERNEL),
    Escape("swap", 'return reached("swapon", b"/nowhere", 0)', "root"),
    Escape("account processes", 'return reached("acct", b"/nowhere")', "root"),
    Escape("reboot", 'return reached("reboot", 0, 0, 0, None)', "root"),
    Escape("set the clock", 'call(164 if HOST["machine"] == "x86_64" else 170, None, None)\nreturn "allowed"', "root"),
    Escape("rename the host", 'call("sethostname", b"owned", 5)\nreturn os.uname().nodename', "root"),
    Escape("rename the domain", 'call("setdomainname", b"owned", 5)\nreturn "renamed"', "root"),
    Escape("watch the whole file system", 'return reached("fanotify_init", 0, 0)', "root"),
    Escape("hang up a terminal", 'return reached("vhangup")', None, "it would hang up a terminal of this machine"),
    Escape("another personality", 'return reached("personality", 0x0040000)', "root"),
    Escape("look up a cookie of the profiler", 'return reached("lookup_dcookie", 0, None, 0)', None, NO_SUCH_KERNEL),
    Escape(
        "a system call of the x32 table",
        'return reached(0x40000000 | 39) if HOST["machine"] == "x86_64" else ""',
        None,
        NO_SUCH_KERNEL,
    ),
    Escape(
        "a system call of the 32-bit table",
        """
        if HOST["machine"] != "x86_64":
            return ""
        # mov eax, 20 (getpid of i386); int 0x80; ret
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))
        at = ctypes.addressof(ctypes.c_char.from_buffer(code))
        return f"pid {ctypes.CFUNCTYPE(ctypes.c_int)(at)()}"
        """,
        None,
        NO_SUCH_KERNEL,
    ),
    *(
        Escape(
            f"a socket of the family {name}",
            f"socket.socket({family}, {kind}, {protocol}).close()\nreturn 'made'",
            None,
            NO_SUCH_KERNEL,
        )
        for name, family, kind, protocol in (
            ("VSOCK, which no network namespace holds", 40, "socket.SOCK_STREAM", 0),
            ("ALG, the kernel's ciphers", 38, "socket.SOCK_SEQPACKET", 0),
            ("PACKET", 17, "socket.SOCK_RAW", 3),
            ("TIPC", 30, "socket.SOCK_SEQPACKET", 0),
            ("RDS", 21, "socket.SOCK_SEQPACKET", 0),
            ("BLUETOOTH", 31, "socket.SOCK_RAW", 1),
            ("CAN", 29, "socket.SOCK_RAW", 1),
            ("KEY", 15, "socket.SOCK_RAW", 2),
            ("XDP", 44, "socket.SOCK_RAW", 0),
            ("SMC", 43, "socket.SOCK_STREAM", 0),
            ("QIPCRTR", 42, "socket.SOCK_DGRAM", 0),
        )
    ),
)
