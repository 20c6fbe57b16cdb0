"""Attempts to reach the host's network, files, processes and memory, and another sandbox."""

from __future__ import annotations

from tests.sandbox.escapes import Escape

OUTSIDE = "it would speak to a machine that is not ours"
WALK = """
skipped = ("/sys", "/proc")
paths = []
for top in [*{tops!r}, os.path.dirname(HOST["file"])]:
    for base, folders, names in os.walk(top):
        folders[:] = [name for name in folders if os.path.join(base, name) not in skipped]
        paths += [os.path.join(base, name) for name in names]
        if len(paths) > 20_000:
            break
"""

ESCAPES = (
    Escape("read a file of the host", 'return secrets_in([HOST["file"]])', "host"),
    Escape(
        "read a file of the host through /proc",
        """
        roots = [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit() for name in ("root", "cwd")]
        return secrets_in([root + HOST["file"] for root in roots] + ["../" * 20 + HOST["file"]])
        """,
        "host",
    ),
    Escape(
        "write a file of the host",
        """
        for path in (HOST["file"], "/proc/1/root" + HOST["file"], os.path.dirname(HOST["file"]) + "/planted"):
            try:
                with open(path, "w") as f:
                    f.write("touched")
            except OSError:
                pass
        """,
        "host",
    ),
    Escape(
        "find a secret in any process",
        'return secrets_in(glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"))',
        "host",
    ),
    Escape(
        "find another sandbox's files",
        WALK.format(tops=["/work", "/tmp", "/dev/shm", "/mnt", "/run", "/var"]) + "return secrets_in(paths)",
        "host",
    ),
    Escape(
        "find another sandbox's files through /proc",
        """
        got = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if pid in ("self", str(os.getpid())):
                continue
            got += secrets_in([f"/proc/{pid}/root/{name}" for name in ("work/neighbour", "tmp/neighbour")])
        return got
        """,
        None,
        "the host's root sees every sandbox's files so, and nobody else can be put in its place",
    ),
    Escape("signal a process of the host", 'os.kill(HOST["pid"], signal.SIGKILL)\ntime.sleep(0)', "host"),
    Escape("hold a process of the host", 'return os.pidfd_open(HOST["pid"])', "host"),
    Escape("trace a process of the host", 'call("ptrace", 0x4206, HOST["pid"], 0, 0)\nreturn "seized"', "host"),
    Escape(
        "read the memory of a process of the host",
        'return opened(["/proc/%d/%s" % (HOST["pid"], name) for name in ("mem", "environ")])',
        "host",
    ),
    Escape(
        "connect to the host's loopback",
        """
        for address in HOST["tcp"]:
            try:
                socket.create_connection(tuple(address), 3).close()
            except OSError:
                pass
        """,
        "host",
    ),
    Escape(
        "send a datagram to the host's loopback",
        'with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n    s.sendto(b"x", tuple(HOST["udp"]))',
        "host",
    ),
    Escape(
        "connect to an abstract socket of the host",
        'with socket.socket(socket.AF_UNIX) as s:\n    s.connect("\\0" + HOST["abstract"])',
        "host",
    ),
    Escape(
        "attach the host's shared memory",
        'return "segment %d" % call("shmget", HOST["shared_key"], 0, 0)',
        "host",
    ),
    Escape(
        "connect to any socket that is a file",
        """
        got = []
        found = [path for top in ("/run", "/var/run", "/tmp") for path in glob.glob(f"{top}/**", recursive=True)]
        for path in [*found, "/run/tenuto/agent.sock"]:
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(3)
                try:
                    s.connect(path)
                    if s.recv(1):
                        got.append(path)
                except OSError:
                    pass
        return got
        """,
        None,
        "the sockets of this machine belong to others",
    ),
    Escape(
        "find the socket of a container engine",
        'names = ("docker.sock", "containerd/containerd.sock", "crio/crio.sock", "podman/podman.sock")\n'
        'return [name for name in names for top in ("/run", "/var/run") if os.path.exists(f"{top}/{name}")]',
        "host",
    ),
    Escape(
        "ask the metadata service",
        'socket.create_connection(("169.254.169.254", 80), 3).close()\nreturn "connected"',
        None,
        OUTSIDE,
    ),
    Escape("ask for a name", 'return socket.getaddrinfo("example.com", 80)', None, OUTSIDE),
    Escape(
        "ask a name server directly",
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.sendto(b"\\0" * 12, ("8.8.8.8", 53))
            return "sent"
        """,
        None,
        OUTSIDE,
    ),
    Escape(
        "find an interface that leads out",
        """
        idle = ("lo", "sit", "tunl", "ip6tnl", "gre", "erspan", "ip_vti", "ip6_vti", "ip6gre")  # in every namespace
        return [name for _, name in socket.if_nameindex() if not name.startswith(idle)]
        """,
        "host",
    ),
    Escape(
        "add an interface",
        """
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
            kind = struct.pack("HH", 9, 1) + b"dummy\\0\\0\\0"
            info = struct.pack("HH", 4 + len(kind) + 0, 18) + kind
            body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + info
            s.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
            answer = struct.unpack("i", s.recv(4096)[16:20])[0]
        if answer in (-errno.EPERM, -errno.EACCES):
            raise OSError(errno.EPERM, "refused")
        return f"netlink answered {answer}"
        """,
        "root",
    ),
    Escape("make a raw socket", 'socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()\nreturn "made"', "root"),
)
