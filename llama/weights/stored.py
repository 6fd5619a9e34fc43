"""What a Hugging Face folder holds, found out without reading it whole: its type, a fingerprint."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from llama.weights.header import Place
from llama.weights.hf import HFSource
from llama.weights.ranges import nbytes

_SAMPLES, _SAMPLE_BYTES = 4, 4096  # of each tensor


def stored_dtype(dir: str | Path) -> torch.dtype:
    """The type of the weights in a Hugging Face folder: the narrowest that holds all of them.

    That is their own, where they have the same; of float16 and bfloat16 it is float32. From the
    headers alone. Errors as in `load_hf`; ValueError if none are 16-, 32- or 64-bit floats.
    """
    places = HFSource(dir).stored.values()
    dtypes = {p.dtype for p in places if p.dtype.is_floating_point and p.dtype.itemsize > 1}
    if not dtypes:
        raise ValueError(
            f"{dir}: no tensors of 16-, 32- or 64-bit floats: quantised weights are not understood"
        )
    return functools.reduce(torch.promote_types, dtypes)


def fingerprint(dir: str | Path) -> str:
    """SHA-256, in hex, that tells the weights of one Hugging Face folder from another's.

    Of every tensor it takes name, type, shape and 4 samples of 4 KiB, spread evenly from its first
    byte to its last. So it is the same wherever the folder lies and however the tensors are shared
    among files, and another as soon as a tensor was trained, which changes it nearly everywhere; a
    change between samples is not seen. At most 16 KiB of a tensor are read. Errors as in `load_hf`.
    """
    digest = hashlib.sha256()
    for name, place in sorted(HFSource(dir).stored.items()):
        digest.update(f"{name} {place.dtype} {place.shape}\n".encode())
        for sample in _samples(place):
            digest.update(sample)
    return digest.hexdigest()


def _samples(place: Place) -> Iterator[bytes]:
    size = nbytes(place.shape, place.dtype)
    length = min(size, _SAMPLE_BYTES)
    # Of a tensor that is shorter than all samples, they overlap and are all of it.
    begins = sorted({(size - length) * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    fd = os.open(place.path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # no readahead
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for begin in begins:
            yield os.pread(fd, length, place.offset + begin)
    finally:
        os.close(fd)
