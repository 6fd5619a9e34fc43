"""Large pages for large host buffers.

glibc gives blocks of more than 32 MiB straight back to the system, so each time a large unit is
gathered its pages are made anew, 4 KiB at a time: about 3% of a step that is all compute. Asked
for, Linux makes them 2 MiB at a time.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import torch

_LARGE_BYTES = 2**25
_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> ctypes._CFuncPtr | None:
    if platform.system() != "Linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def prefer_huge(storage: torch.UntypedStorage) -> None:
    """Ask for large pages under a host storage that has just been given memory; only a wish."""
    if storage.nbytes() < _LARGE_BYTES or storage.device.type != "cpu" or _madvise() is None:
        return
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    _madvise()(first, end - first, _MADV_HUGEPAGE)
