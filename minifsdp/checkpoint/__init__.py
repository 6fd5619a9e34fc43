"""Sharded checkpoints on `torch.distributed.checkpoint`: each rank writes and reads its own rows.

    checkpoint.save("run/checkpoints", step, state, keep_last=2)
    checkpoint.load("run/checkpoints", state)  # the latest, tensors in place

[Note: what is a checkpoint]
A run's checkpoints are the folders `step-00000042` of one directory. Ranks write to a hidden
neighbour, each its own rows; when all have finished, rank 0 writes `manifest.json`, with the size
and the SHA-256 of every file, waits until all of it is on the disk, and renames the folder. So a
run that dies while it saves leaves nothing that `latest` would find, and a checkpoint that was
damaged later is known for it: one whose files are missing or of another size is passed over, and
one whose bytes have changed is refused, by name, before anything of it is used.

[Note: nothing in a file is executed]
Tensors lie in torch's own files, which are read with `weights_only=True`; where their rows are says
`.metadata`, a pickle, which is read through a list of the classes that may occur in it. Everything
that is not a tensor is in `values.json`. Whoever can write to a checkpoint can change weights, but
cannot run code.
"""

from .folder import latest, step_of
from .loading import load
from .manifest import DamagedError
from .rng import restore_rng, rng_states
from .saving import SaveError, save, wait

__all__ = [
    "DamagedError",
    "SaveError",
    "latest",
    "load",
    "restore_rng",
    "rng_states",
    "save",
    "step_of",
    "wait",
]
