"""A system call filter in classic BPF, without a library: what no tool needs and what widens the kernel's face.

The filter is a denylist: EPERM for the calls below, ENOSYS for clone3 (its flags are behind a pointer, so the C library
must fall back to clone), EPERM for clone with a new user namespace, for prlimit on another process and for what would
make the first process, the agent, wait for all others. Only families of sockets that a network namespace holds can be
had: AF_VSOCK, for one, leads to the machine that this one is a guest of. A call of a foreign architecture kills the
process.
"""

from __future__ import annotations

import platform
import struct

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000

# name: (x86-64, aarch64); None where the architecture has no such call
DENIED: dict[str, tuple[int | None, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),  # whoever dies when memory is short, what such a file holds stays
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
SEGMENTS: dict[str, tuple[int | None, int]] = {"shmget": (29, 194)}
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1), "arm64": (0xC00000B7, 1)}
CLONE, CLONE3, PRLIMIT, SOCKET = (56, 220), (435, 435), (302, 261), (41, 198)
OF_ONE = {
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
# name: (numbers, which "who" is a single process)
OF_MANY = {"ioprio_set": ((251, 30), 1), "setpriority": ((141, 140), 0)}
AGENT = 1
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


def supported(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in ARCHITECTURES


def program(*, segments: bool, machine: str | None = None) -> bytes:
    """The filter as an array of struct sock_filter.

    `segments`: System V shared memory can be had. It outlives its makers, so something else must hold it to a size.
    Raises ValueError for an architecture whose numbers are not in the table.
    """
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        raise ValueError(f"no system call filter for {name}; known: {', '.join(sorted(ARCHITECTURES))}")
    arch, column = ARCHITECTURES[name]
    code = [_op(LOAD, ARCH), _op(EQUAL, arch, 1, 0), _op(RETURN, KILL), _op(LOAD, NUMBER)]
    if column == 0:
        code += [_op(AT_LEAST, X32, 0, 1), _op(RETURN, ERRNO | EPERM)]
    for numbers in {**DENIED, **({} if segments else SEGMENTS)}.values():
        number = numbers[column]
        if number is not None:
            code += _rule(number, [_op(RETURN, ERRNO | EPERM)])
    code += _rule(CLONE3[column], [_op(RETURN, ERRNO | ENOSYS)])
    code += _rule(CLONE[column], [_op(LOAD, FIRST_ARGUMENT), _op(ANY_BIT, CLONE_NEWUSER, 0, 1), *_REFUSED_ELSE_ALLOWED])
    code += _rule(PRLIMIT[column], [_op(LOAD, FIRST_ARGUMENT), _op(EQUAL, 0, 1, 0), *_REFUSED_ELSE_ALLOWED])
    for numbers in OF_ONE.values():
        code += _rule(numbers[column], [_op(LOAD, FIRST_ARGUMENT), _op(EQUAL, AGENT, 0, 1), *_REFUSED_ELSE_ALLOWED])
    for both, single in OF_MANY.values():
        group = [_op(LOAD, FIRST_ARGUMENT), _op(EQUAL, single, 1, 0), _op(RETURN, ERRNO | EPERM)]
        code += _rule(
            both[column], [*group, _op(LOAD, SECOND_ARGUMENT), _op(EQUAL, AGENT, 0, 1), *_REFUSED_ELSE_ALLOWED]
        )
    known = [_op(EQUAL, family, len(FAMILIES) - at, 0) for at, family in enumerate(FAMILIES)]
    refused = [_op(RETURN, ERRNO | EAFNOSUPPORT), _op(RETURN, ALLOW)]
    code += _rule(SOCKET[column], [_op(LOAD, FIRST_ARGUMENT), *known, *refused])
    return b"".join([*code, _op(RETURN, ALLOW)])


def _rule(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which ends in an answer, for one system call; the others go past it."""
    return [_op(EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


_REFUSED_ELSE_ALLOWED = [_op(RETURN, ERRNO | EPERM), _op(RETURN, ALLOW)]
