"""Runs Python code for a model in a sandbox: started as a script, imports nothing of this project.

Arguments: folder, memory in bytes, CPU seconds, size of files in bytes, processes. The code comes on standard
input. The network and other processes are not visible (namespaces, man 7 namespaces). Only files of Python
and the system's libraries can be read, and only the folder be written (Landlock, man 7 landlock). Sockets are
refused (seccomp, man 2 seccomp), because a socket file would lead to other processes. Exit code 97: this
system cannot sandbox the code, so nothing was run.

There are three processes: the one that was started; the first of the namespaces, which runs none of the code,
and whose end ends all others in them; and the one that runs the code.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from typing import NoReturn

_REFUSED = 97
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_NEW_MOUNTS = 0x00020000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_UNPRIVILEGED_ID = 65534
_ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""The kernel's number of the architecture, and of its system call `socket`."""
_IO_URING_SETUP = 425
_X32 = 0x40000000
"""System calls from this number on use another calling convention of x86_64."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def _refuse(what: str) -> NoReturn:
    error = os.strerror(ctypes.get_errno())
    os.write(2, f"{what}: {error}\n".encode())
    os._exit(_REFUSED)


def _lock_files(folder: str) -> None:
    """Landlock: read access to Python and libraries, full access to `folder`, nothing else."""
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        _refuse("Landlock is not available")
    # File rights were added with versions 2 (refer), 3 (truncate) and 5 (ioctl).
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0  # TCP: bind, connect
    attributes = struct.pack("QQ", every, network)[: 16 if version >= 4 else 8]
    rules = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        _refuse("Landlock makes no rules")
    reading = 0b1101  # execute, read a file, list a folder
    shared = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    allowed = [(path, reading) for path in sorted({*shared, "/usr", "/lib", "/lib64"})]
    allowed += [(path, 0b0111 & ~1) for path in ("/dev/null", "/dev/zero")] + [("/dev/urandom", 0b0100)]
    for path, rights in [*allowed, (folder, every)]:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if _LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights & every, opened), 0):
            _refuse(f"Landlock takes no rule for {path}")
        os.close(opened)
    if _LIBC.prctl(38, 1, 0, 0, 0) or _LIBC.syscall(_RESTRICT_SELF, rules, 0):
        _refuse("Landlock does not hold")
    os.close(rules)


def _lock_sockets() -> None:
    """A filter of system calls that refuses `socket`, and io_uring, which can open sockets too."""
    numbers = _ARCHITECTURES.get(platform.machine())
    if numbers is None:
        _refuse(f"no filter of system calls is known for {platform.machine()}")
    architecture, socket = numbers
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | 13, 0x7FFF0000
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the call
        (equal, 3, 0, socket),
        (equal, 2, 0, _IO_URING_SETUP),
        (at_least, 1, 0, _X32),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HP", len(program), ctypes.addressof(code))
    if _LIBC.prctl(22, 2, filters, 0, 0):
        _refuse("no filter of system calls is taken")


def _wait_for(child: int) -> int:
    """Its exit code, as in a shell. Other children that end meanwhile are reaped."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _drop_capabilities() -> None:
    """Drop those that the first process of a namespace has in it."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if _LIBC.capset(header, none):
        _refuse("capabilities cannot be dropped")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    names = [word.encode() for word in (source, target, kind)]
    if _LIBC.mount(*names, ctypes.c_ulong(flags), data.encode()):
        _refuse(f"{target} cannot be mounted")


def _show_python(folder: str) -> None:
    """For root, whose Python may be in a home directory that other users cannot enter: a view of the files,
    only for this process, in which that home contains only Python."""
    hidden: dict[str, list[str]] = {}
    for path in {sys.prefix, sys.base_prefix}:
        parts = path.strip("/").split("/")
        above = ["/" + "/".join(parts[: size + 1]) for size in range(len(parts))]
        closed = next((one for one in above if not os.stat(one).st_mode & 1), None)
        if closed is not None:
            hidden.setdefault(closed, []).append(path)
    if not hidden:
        return
    if _LIBC.unshare(_NEW_MOUNTS):
        _refuse("mounts are not available")
    _mount("none", "/", "", 0x44000, "")  # private, all below
    for closed, paths in hidden.items():
        kept = [os.path.join(folder, f".mount{number}") for number in range(len(paths))]
        for path, mount_point in zip(paths, kept, strict=True):
            os.mkdir(mount_point)
            _mount(path, mount_point, "", 0x5000, "")  # bind, all below
        _mount("none", closed, "tmpfs", 0, "mode=755")
        for path, mount_point in zip(paths, kept, strict=True):
            os.makedirs(path, exist_ok=True)
            _mount(mount_point, path, "", 0x2000, "")  # move
            os.rmdir(mount_point)


def main() -> None:
    folder, memory, seconds, size, processes = sys.argv[1], *map(int, sys.argv[2:6])
    code = sys.stdin.read()
    os.chdir(folder)
    if os.geteuid() == 0:
        _show_python(folder)
        # The limit on processes does not apply to the system's root.
        os.setgroups([])
        os.setgid(_UNPRIVILEGED_ID)
        os.setuid(_UNPRIVILEGED_ID)
    try:
        # If memory runs out, the system kills the code first, not the server.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    if _LIBC.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC):
        _refuse("namespaces are not available")
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the server
    first = os.fork()
    if first:
        os._exit(_wait_for(first))
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
    _drop_capabilities()
    runs = os.fork()
    if runs:
        os._exit(_wait_for(runs))
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _lock_files(folder)
    _lock_sockets()
    del sys.argv[1:]
    sys.argv[0] = "<code>"
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the purpose of this process


if __name__ == "__main__":
    main()
