"""`.metadata`, which says where tensors' rows are: a pickle, read without running any of it."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

METADATA = ".metadata"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks its argument up among torch's layouts
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _Unpickler(pickle.Unpickler):
    """Makes nothing but the metadata of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how some Pythons pickle an enum's member
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a tensor's metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _member(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """The only thing that a pickle of ours looks up by name: a memory format."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it looks up {name!r}, which is no memory format")
    return _MEM_FORMAT_ENCODING[name]


@contextlib.contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Raise UnpicklingError if a class was changed meanwhile, and undo it.

    A pickle can set attributes on whatever it may name, classes included.
    """
    classes = [getattr(importlib.import_module(module), name) for module, name in _ALLOWED]
    before = {cls: dict(vars(cls)) for cls in classes if isinstance(cls, type)}
    changed = False
    try:
        yield
    finally:
        for cls, attributes in before.items():
            for name, value in dict(vars(cls)).items():
                if name not in attributes:
                    delattr(cls, name)
                elif attributes[name] is not value:
                    setattr(cls, name, attributes[name])
                else:
                    continue
                changed = True
    if changed:
        raise pickle.UnpicklingError("it changes a class")


def read_metadata(path: Path, files: set[str]) -> Metadata:
    """The `.metadata` of checkpoint `path`, in which all tensors lie in `files`.

    Raises ValueError, with the reason, for anything else; nothing that the file says is executed.
    """
    try:
        with (path / METADATA).open("rb") as file, _unchanged_classes():
            metadata = _Unpickler(file).load()
    except Exception as error:  # whatever unpickling makes of other bytes
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else type(error).__name__
        raise ValueError(f"its {METADATA} is unreadable: {reason}") from None
    if not _is_plain(metadata, files):
        raise ValueError(f"its {METADATA} does not describe tensors in files of this folder")
    return metadata


def _is_plain(metadata: Any, files: set[str]) -> bool:
    """Whether all it describes are tensors, as plain rows in `files`."""
    try:
        kinds = all(
            isinstance(name, str) and isinstance(about, TensorStorageMetadata)
            for name, about in metadata.state_dict_metadata.items()
        )
        places = all(
            isinstance(index, MetadataIndex)
            and place.relative_path in files
            and not place.transform_descriptors  # decoders that a file may ask for
            for index, place in metadata.storage_data.items()
        )
    except (AttributeError, TypeError):
        return False
    return isinstance(metadata, Metadata) and kinds and places


class Reader(FileSystemReader):
    """torch's reader of tensors, given metadata that have been read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Instead of torch's, which unpickles the file."""
        return self._metadata
