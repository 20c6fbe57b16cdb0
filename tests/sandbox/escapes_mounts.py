"""Attempts to see or make another file system, and to get into another namespace."""

from __future__ import annotations

from tests.sandbox.escapes import Escape

ESCAPES = (
    Escape("mount a tmpfs", 'call("mount", b"none", b"/tmp", b"tmpfs", 0, None)\nreturn "mounted"', "root"),
    Escape("bind the root elsewhere", 'call("mount", b"/", b"/mnt", None, 4096, None)\nreturn "bound"', "root"),
    Escape(
        "remount the root writable",
        'call("mount", None, b"/", None, 4096 | 32, None)\nreturn "remounted"',
        "root",
    ),
    Escape("unmount what covers something", 'call("umount2", b"/dev/shm", 2)\nreturn "unmounted"', "root"),
    Escape(
        "mount an overlay",
        """
        for name in ("low", "up", "work"):
            os.makedirs(f"/dev/shm/o/{name}", exist_ok=True)
        options = b"lowerdir=/dev/shm/o/low,upperdir=/dev/shm/o/up,workdir=/dev/shm/o/work"
        call("mount", b"overlay", b"/dev/shm/o/low", b"overlay", 0, options)
        return "mounted"
        """,
        "root",
    ),
    Escape("open the device of FUSE", 'return opened(["/dev/fuse"], os.O_RDWR)', "root"),
    Escape("make a file system by fsopen", 'return call("fsopen", b"tmpfs", 0)', "root"),
    Escape(
        "clone the tree by open_tree",
        'return call("open_tree", -100, b"/", 1)',
        "root",
    ),
    Escape("change a mount by mount_setattr", 'return reached("mount_setattr", -100, b"/", 0, None, 0)', "root"),
    Escape("move a mount by move_mount", 'return reached("move_mount", -1, b"", -1, b"", 0)', "root"),
    Escape("pick a mount by fspick", 'return reached("fspick", -100, b"/nowhere", 0)', "root"),
    Escape("pivot_root", 'return reached("pivot_root", b"/tmp", b"/tmp")', "root"),
    Escape("chroot", 'os.chroot("/tmp")\nreturn "chroot"', "root"),
    *(
        Escape(f"unshare {name}", f'call("unshare", {flag})\nreturn "unshared"', "root")
        for name, flag in {
            "the user namespace": 0x10000000,
            "the mount namespace": 0x00020000,
            "the network namespace": 0x40000000,
            "the pid namespace": 0x20000000,
            "the cgroup namespace": 0x02000000,
            "the host name": 0x04000000,
        }.items()
    ),
    Escape(
        "clone into a new user namespace",
        """
        pid = call("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        return f"process {pid}"
        """,
        "root",
    ),
    Escape(
        "clone3 into a new user namespace",
        """
        arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, signal.SIGCHLD)
        pid = call("clone3", ctypes.byref(arguments), 88)
        if pid == 0:
            os._exit(0)
        return f"process {pid}"
        """,
        "root",
    ),
    Escape(
        "enter a namespace of the first process",
        """
        for name in ("user", "mnt", "net", "pid", "uts", "ipc", "cgroup"):
            for pid in (1, HOST["pid"]):
                try:
                    call("setns", os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0)
                    return name
                except OSError:
                    pass
        """,
        "root",
    ),
    Escape("setns at all", 'return reached("setns", -1, 0)', "root"),
    Escape(
        "map other users",
        """
        for name, text in (("uid_map", "0 0 4294967295"), ("gid_map", "0 0 4294967295")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
        return "mapped"
        """,
        None,
        "only the first writer of a new namespace may, and that one has its own attempt",
    ),
    Escape(
        "open a file by its handle (shocker)",
        """
        handle = struct.pack("IiQ", 8, 1, 2)  # the root of a disk is inode 2
        return reached("open_by_handle_at", os.open("/", os.O_RDONLY), handle, 0)
        """,
        "root",
    ),
    Escape(
        "make a handle of a file",
        """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 160)
        return reached("name_to_handle_at", -100, b"/", handle, ctypes.byref(ctypes.c_int()), 0)
        """,
        "root",
    ),
)
