"""Sleeping until another process changes a number in shared memory: Linux's futex, on x86-64.

Python has no name for the system call, so it goes through the C library. A sleep and a look would
wake up too late by more than a copy takes; looking all the time takes the core from whoever is
waited for, where there are more ranks than cores.
"""

from __future__ import annotations

import ctypes
import functools

_SYS_FUTEX, _WAIT, _WAKE = 202, 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _syscall() -> ctypes._CFuncPtr:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.argtypes = [
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_uint32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
    ]
    return function


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the low 32 bits of the number at `address` are those of `seen`.

    Returns when it is woken, at once if they differ, or after `seconds`; look again in any case.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall()(_SYS_FUTEX, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake everybody who sleeps on `address`."""
    _syscall()(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)
