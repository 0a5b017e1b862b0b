"""What an opener process (`opener`) takes from itself before it reads the first file, so that code which a
hostile file brings into it can do little more than return wrong pixels.

* No privileges, no core dump.
* A filter of system calls (seccomp): memory, threads, and the files that it has been given. It cannot open a
  file or a socket, start a process or a program, send a signal, or make memory executable. A call that is
  not allowed fails with EPERM.
* For each item (`Confinement.bound`): files, address space, CPU time, and bytes of the result.

One thread, in the opener. Linux on x86-64 and aarch64. Where the kernel has no such filter, the limits
remain, and the asker logs a warning.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import platform
import resource
import struct
import time

from cluster.media.settings import MediaSettings

NUM_FILES = 16  # descriptors; an opener has three standard streams, its socket and the two files of an order

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CAPABILITIES_3 = 0x20080522  # version of the call's structure
_SET_MODE_FILTER, _FILTER_ALL_THREADS = 1, 1
_MACHINES = {"x86_64": 0, "aarch64": 1}  # machine → column of the tables below
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_SECCOMP = (317, 277)
_CLONE3 = 435  # on both. glibc falls back to clone, whose flags a filter can read

# system call: (number on x86-64, on aarch64)
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "ftruncate": (77, 46), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getpid": (39, 172), "gettid": (186, 178),
    "getrusage": (98, 165), "sysinfo": (99, 179), "getrandom": (318, 278), "gettimeofday": (96, 169),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_IS, _HAS, _LACKS = "is", "has", "lacks"
_CLONE_THREAD, _PROT_EXEC = 0x10000, 4
# the same for calls with a condition: (argument, condition, value)
_CHECKED = {
    "clone": ((56, 220), 0, _HAS, _CLONE_THREAD),
    "mmap": ((9, 222), 2, _LACKS, _PROT_EXEC),
    "mprotect": ((10, 226), 2, _LACKS, _PROT_EXEC),
    "fcntl": ((72, 25), 1, _IS, fcntl.F_ADD_SEALS),
    "prlimit64": ((302, 261), 0, _IS, 0),  # its own limits
}

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: LD W ABS, JMP JEQ K, JMP JSET K, RET K
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand


class Confinement:
    """Takes effect when it is made, and cannot be undone."""

    def __init__(self):
        self._base_bytes = virtual_bytes()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _limit(resource.RLIMIT_CORE, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset(struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24))  # of root's capabilities none is left
        self.is_filtered = _install_filter(libc)

    def bound(self, settings: MediaSettings, timeout_s: float) -> None:
        """Sets the limits for the next item. The limits of bytes can only fall from one item to the next. The
        limit of files is set here, after the opener has sent its last descriptor: the kernel compares it also
        with the descriptors that all processes of the user have under way."""
        _limit(resource.RLIMIT_NOFILE, NUM_FILES)
        _limit(resource.RLIMIT_AS, self._base_bytes + settings.limits.max_process_bytes)
        _limit(resource.RLIMIT_FSIZE, settings.max_result_bytes)
        num_cpus = len(os.sched_getaffinity(0))
        cpu_s = math.ceil(time.process_time() + num_cpus * timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))


def _limit(kind: int, value: int) -> None:
    _, highest = resource.getrlimit(kind)
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    resource.setrlimit(kind, (value, value))


def virtual_bytes() -> int:
    """The address space of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _install_filter(libc: ctypes.CDLL) -> bool:
    """Installs the filter for all threads of this process. False: this kernel or machine has no filters."""
    column = _MACHINES.get(platform.machine())
    if column is None:
        return False
    instructions = _filter(column)
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    description = struct.pack("HP", len(instructions), ctypes.addressof(program))
    call = (ctypes.c_long(number) for number in (_SECCOMP[column], _SET_MODE_FILTER, _FILTER_ALL_THREADS))
    return libc.syscall(*call, description) == 0


def _filter(column: int) -> list[_Instruction]:
    """The program of the filter for one machine."""
    refuse = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[column]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for numbers in _ALLOWED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    for numbers, argument, condition, value in _CHECKED.values():
        test = _EQUAL if condition == _IS else _ANY_BIT
        program += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),  # the low half, on both machines
            (test, 1, 0, value) if condition == _LACKS else (test, 0, 1, value),
            (_RETURN, 0, 0, _ALLOW),
            refuse,
        ]
    return [*program, refuse]
