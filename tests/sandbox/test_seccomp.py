"""The filter is run here by a small interpreter of classic BPF, so that both architectures are tested anywhere."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from sandbox import seccomp

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def verdict(code: bytes, number: int, arch: int, first: int = 0, second: int = 0) -> int:
    data = {seccomp.NUMBER: number, seccomp.ARCH: arch}
    data |= {seccomp.FIRST_ARGUMENT: first & 0xFFFFFFFF, seccomp.SECOND_ARGUMENT: second & 0xFFFFFFFF}
    program = list(struct.iter_unpack("<HBBI", code))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        if operation == seccomp.RETURN:
            return int(value)
        if operation == seccomp.LOAD:
            accumulator = data[value]
            continue
        holds = {
            seccomp.EQUAL: accumulator == value,
            seccomp.AT_LEAST: accumulator >= value,
            seccomp.ANY_BIT: bool(accumulator & value),
        }[operation]
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_named_call_is_denied_and_every_other_allowed(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    code = seccomp.program(segments=False, machine=machine)
    denied = {pair[column] for pair in [*seccomp.DENIED.values(), *seccomp.SEGMENTS.values()]}
    restricted = {seccomp.SOCKET[column], *(pair[column] for pair, _ in seccomp.OF_MANY.values())}
    for number in range(1000):
        if number in denied:
            assert verdict(code, number, arch) == seccomp.ERRNO | seccomp.EPERM
        elif number == seccomp.CLONE3[column]:
            assert verdict(code, number, arch) == seccomp.ERRNO | seccomp.ENOSYS
        elif number in restricted:
            continue
        else:
            assert verdict(code, number, arch) == seccomp.ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_that_outlives_its_makers_is_denied_where_nothing_holds_it_to_a_size(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    number = seccomp.SEGMENTS["shmget"][column]
    assert number is not None
    assert verdict(seccomp.program(segments=True, machine=machine), number, arch) == seccomp.ALLOW
    assert verdict(seccomp.program(segments=False, machine=machine), number, arch) != seccomp.ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_thread_and_a_fork_are_allowed_and_a_user_namespace_is_not(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    code = seccomp.program(segments=True, machine=machine)
    for flags in (17, 0x3D0F00, 0x01200011):
        assert verdict(code, seccomp.CLONE[column], arch, flags) == seccomp.ALLOW
    for flags in (0x10000000, 0x10000011, 0x7E020000 | 0x10000000):
        assert verdict(code, seccomp.CLONE[column], arch, flags) == seccomp.ERRNO | seccomp.EPERM


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_process_may_set_its_own_limits_and_no_other_s(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    code = seccomp.program(segments=True, machine=machine)
    assert verdict(code, seccomp.PRLIMIT[column], arch, 0) == seccomp.ALLOW
    assert verdict(code, seccomp.PRLIMIT[column], arch, 1) == seccomp.ERRNO | seccomp.EPERM


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_process_may_set_its_own_turn_and_not_the_agent_s(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    code = seccomp.program(segments=True, machine=machine)
    refused = seccomp.ERRNO | seccomp.EPERM
    for numbers in seccomp.OF_ONE.values():
        assert verdict(code, numbers[column], arch, 0) == verdict(code, numbers[column], arch, 77) == seccomp.ALLOW
        assert verdict(code, numbers[column], arch, 1) == refused
    for numbers, single in seccomp.OF_MANY.values():
        assert verdict(code, numbers[column], arch, single, 77) == seccomp.ALLOW
        assert verdict(code, numbers[column], arch, single, 1) == refused
        assert verdict(code, numbers[column], arch, single + 1, 77) == refused


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_sockets_that_a_network_namespace_holds_can_be_had(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    code = seccomp.program(segments=True, machine=machine)
    allowed = {family for family in range(64) if verdict(code, seccomp.SOCKET[column], arch, family) == seccomp.ALLOW}
    assert allowed == set(seccomp.FAMILIES)
    assert verdict(code, seccomp.SOCKET[column], arch, 40) == seccomp.ERRNO | seccomp.EAFNOSUPPORT


def test_a_call_of_a_foreign_architecture_kills_and_one_of_x32_is_denied() -> None:
    code = seccomp.program(segments=True, machine="x86_64")
    assert verdict(code, 1, 0x40000003) == seccomp.KILL
    assert verdict(code, 0x40000000 | 1, 0xC000003E) == seccomp.ERRNO | seccomp.EPERM


def test_an_unknown_processor_is_named() -> None:
    assert not seccomp.supported("sparc")
    with pytest.raises(ValueError, match="sparc"):
        seccomp.program(segments=True, machine="sparc")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernel_s_own_headers(machine: str) -> None:
    path = Path(HEADERS[machine])
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    known = {name: int(number) for name, number in re.findall(r"__NR3?_?(?:264_)?(\w+)\s+(\d+)", path.read_text())}
    column = seccomp.ARCHITECTURES[machine][1]
    table = {**seccomp.DENIED, **seccomp.SEGMENTS, "clone": seccomp.CLONE, "clone3": seccomp.CLONE3}
    table |= {"prlimit64": seccomp.PRLIMIT, "socket": seccomp.SOCKET, **seccomp.OF_ONE}
    table |= {name: pair for name, (pair, _) in seccomp.OF_MANY.items()}
    checked = {name for name in table if name in known}
    assert {name: table[name][column] for name in checked} == {name: known[name] for name in checked}
    assert len(checked) > len(table) * 0.8
