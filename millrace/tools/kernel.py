"""The Linux system calls of the sandbox: namespaces, mounts, capabilities and seccomp, by ctypes.

The standard library is enough: a process uses this file before it has any other.
"""

from __future__ import annotations

import ctypes
import os
import struct

from millrace.process.death import check, libc, prctl

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW: mount, UTS, IPC, user, pid and net."""
_ANY_NEW = NEW_NAMESPACES | 0x02000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_RDONLY = 2, 4, 8, 1
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
READ_ONLY, NO_SUID, NO_DEV = 1, 2, 4
_DETACH, _RECURSIVE, _AT_FDCWD = 2, 0x8000, -100
_SET_SECCOMP, _CAPBSET_DROP = 22, 24

# (x86_64, aarch64) numbers. Newer calls have the same number everywhere.
_DENIED = {
    "ptrace": (101, 117), "syslog": (103, 116), "personality": (135, 92),
    "pivot_root": (155, 41), "acct": (163, 89), "mount": (165, 40), "umount2": (166, 39),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "init_module": (175, 105), "delete_module": (176, 106), "quotactl": (179, 60),
    "kexec_load": (246, 104), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "finit_module": (313, 273), "memfd_create": (319, 279), "kexec_file_load": (320, 294),
    "bpf": (321, 280), "userfaultfd": (323, 282), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "pidfd_getfd": (438, 438), "mount_setattr": (442, 442), "memfd_secret": (447, 447),
}  # fmt: skip
_CLONE, _SOCKET, _CLONE3 = (56, 220), (41, 198), 435
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers, and AUDIT_ARCH."""
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


def unshare() -> None:
    """Enter new namespaces. The next child is process 1 of the new pid namespace."""
    check(libc.unshare(ctypes.c_int(NEW_NAMESPACES)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    given = [text.encode() or None for text in (source, target, kind)]
    result = libc.mount(*given, ctypes.c_ulong(flags), options.encode() or None)
    check(result, f"mount {kind or source} at {target}")


def bind(source: str, target: str, *, device: bool = False) -> None:
    """Show `source` at `target`, read-only, with everything mounted below it."""
    mount(source, target, flags=MS_BIND | MS_REC)
    set_flags(target, READ_ONLY | NO_SUID | (0 if device else NO_DEV), recursive=True)


def set_flags(target: str, flags: int, *, recursive: bool = False) -> None:
    """Set the flags of a mount. Needs Linux 5.12."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    result = libc.syscall(
        _number("mount_setattr"),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_RECURSIVE if recursive else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    check(result, f"mount_setattr of {target}")


def pivot(new_root: str, old_root: str) -> None:
    """Make `new_root` the root. The old root appears at `old_root`, a folder below the new one."""
    result = libc.syscall(_number("pivot_root"), new_root.encode(), old_root.encode())
    check(result, "pivot_root")


def _number(name: str) -> ctypes.c_long:
    return ctypes.c_long(_DENIED[name][_MACHINES[os.uname().machine][0]])


def detach(target: str) -> None:
    check(libc.umount2(target.encode(), ctypes.c_int(_DETACH)), f"umount of {target}")


def set_hostname(name: str) -> None:
    check(libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def drop_privileges(uid: int | None) -> None:
    """Give up every capability, now and after any exec, and become `uid` if it is given."""
    for capability in range(64):  # it fails where there is nothing to give up
        libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("Ii", 0x20080522, 0)
    check(libc.capset(header, bytes(24)), "capset")
    prctl("PR_SET_NO_NEW_PRIVS", 1)
    prctl("PR_SET_DUMPABLE", 0)


def filter_program(*, network: bool) -> bytes:
    """Return the seccomp program.

    It refuses system calls that reach past the sandbox. `network` allows sockets of the internet
    families, for a process in a net namespace of its own. Raises OSError on an unknown machine.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(_ENOSYS, f"seccomp: no system call numbers for {machine}")
    column, arch = _MACHINES[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    errno, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, errno | _EPERM)]  # the x32 numbers
    for numbers in _DENIED.values():
        code += [(equal, 0, 1, numbers[column]), (give, 0, 0, errno | _EPERM)]
    # libc then uses clone, whose flags a filter can read.
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, errno | _ENOSYS)]
    code += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _ANY_NEW)]
    code += [(give, 0, 0, errno | _EPERM), (give, 0, 0, allow)]
    families = (1, 2, 10) if network else ()
    code += [(equal, 0, 2 + 2 * len(families), _SOCKET[column]), (load, 0, 0, 16)]
    for family in families:
        code += [(equal, 0, 1, family), (give, 0, 0, allow)]
    code += [(give, 0, 0, errno | _EAFNOSUPPORT), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def install_filter(program: bytes) -> None:
    """Install a seccomp program for this process and its children, for ever."""
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(lines))
    zero = ctypes.c_ulong(0)
    result = libc.prctl(_SET_SECCOMP, ctypes.c_ulong(2), header, zero, zero)
    check(result, "seccomp")
