"""A file system in user space whose fsync takes as long as a test wants: `python slow_fuse.py MOUNTPOINT SECONDS`.

Speaks the kernel's protocol by itself (linux/fuse.h), so that tests need no library. It has one directory, in which
each file can be made, written, synced and removed, and none can be read. With SECONDS -1 an fsync is never answered. It
is unmounted when this process ends.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
import time

LOOKUP, GETATTR, SETATTR, UNLINK, OPEN, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, CREATE = (
    *(1, 3, 4, 10, 14, 16, 17, 18, 20, 25, 26, 35),
)
FORGET, INTERRUPT, BATCH_FORGET = 2, 36, 42
ENOENT, ENOSYS = 2, 38
ROOT, FILE = 1, 2


def attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o777 if node == ROOT else stat.S_IFREG | 0o600
    return struct.pack(
        "<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 2, os.getuid(), os.getgid(), 0, 4096, 0
    )


def entry(node: int) -> bytes:
    return struct.pack("<QQQQII", node, 0, 1, 1, 0, 0) + attributes(node)


def answer(opcode: int, node: int, body: bytes, fsync_s: float) -> bytes | int | None:
    """What the kernel gets; a number is an error, None is no answer."""
    if opcode == INIT:
        return struct.pack("<IIIIHHIIHHIIIIII", 7, 31, 65536, 0, 16, 16, 65536, 1, 0, 0, 0, 0, 0, 0, 0, 0)[
            :64
        ]
    if opcode == LOOKUP:
        return ENOENT
    if opcode in (GETATTR, SETATTR):
        return struct.pack("<QII", 1, 0, 0) + attributes(node)
    if opcode == CREATE:
        return entry(FILE) + struct.pack("<QII", 1, 0, 0)
    if opcode == WRITE:
        return struct.pack("<II", struct.unpack_from("<I", body, 16)[0], 0)
    if opcode == STATFS:
        return struct.pack("<QQQQQIII28x", 2**30, 2**29, 2**29, 10**6, 10**6, 4096, 255, 4096)
    if opcode == FSYNC:
        if fsync_s < 0:
            return None
        time.sleep(fsync_s)
        return b""
    if opcode in (UNLINK, RELEASE, FLUSH):
        return b""
    return ENOSYS


def main(mountpoint: str, fsync_s: float) -> None:
    kernel = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={kernel},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"slow", mountpoint.encode(), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(kernel, 1 << 20)
        except OSError:  # unmounted
            return
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        if opcode in (FORGET, INTERRUPT, BATCH_FORGET):
            continue
        result = answer(opcode, node, request[40:], fsync_s)
        if result is None:
            continue
        error, body = (-result, b"") if isinstance(result, int) else (0, result)
        os.write(kernel, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
