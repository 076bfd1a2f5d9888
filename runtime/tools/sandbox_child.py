"""What runs Python code for a model, locked in: started as a file, with nothing of this project imported.

Arguments: folder, memory in bytes, CPU seconds, size of files in bytes, processes. The code comes on standard
input. No network and no other process is seen (namespaces, man 7 namespaces); files can be read where Python
and the system's libraries are, and written in the folder alone (Landlock, man 7 landlock). Exit code 97:
this system cannot lock it in, so nothing was run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

_REFUSED = 97
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_NEW_MOUNTS = 0x00020000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)


def _refuse(what: str) -> None:
    error = os.strerror(ctypes.get_errno())
    os.write(2, f"{what}: {error}\n".encode())
    os._exit(_REFUSED)


def _lock_files(folder: str) -> None:
    """Landlock: reading where Python and libraries are, everything in `folder`, nothing elsewhere."""
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        _refuse("Landlock is not available")
    # Rights on files grew with versions 2 (refer), 3 (truncate) and 5 (ioctl).
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


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [word.encode() for word in (source, target, kind)]
    if _LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()):
        _refuse(f"{target} cannot be mounted")


def _show_python(folder: str) -> None:
    """For root, whose Python may be in a home that nobody else can enter: a view of the files, for this
    process alone, in which that home holds Python and nothing else."""
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
        for path, place in zip(paths, kept, strict=True):
            os.mkdir(place)
            _mount(path, place, "", 0x5000, "")  # bind, all below
        _mount("none", closed, "tmpfs", 0, "mode=755")
        for path, place in zip(paths, kept, strict=True):
            os.makedirs(path, exist_ok=True)
            _mount(place, path, "", 0x2000, "")  # move
            os.rmdir(place)


def main() -> None:
    folder, memory, seconds, size, processes = sys.argv[1], *map(int, sys.argv[2:6])
    code = sys.stdin.read()
    os.chdir(folder)
    if os.geteuid() == 0:
        _show_python(folder)
        # The system's root has no limit on processes.
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    if _LIBC.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC):
        _refuse("namespaces are not available")
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # The first process of the namespace: with it everything in it ends.
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
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
    del sys.argv[1:]
    sys.argv[0] = "<code>"
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - what it is for


if __name__ == "__main__":
    main()
