"""From a folder of conversations to batches of token ids.

A file's lines are told apart (`formats`), put as the model is to see them (`templates`), tokenised
(`reading`) into a store (`store`) that is kept for the next run (`cache`), cut to the sequence
length (`corpus`), and, in the order of an epoch (`order`), packed into rows (`packing`) and made
into tensors (`batch`, `batches`).
"""

from llama.finetune.data.batch import NO_LOSS, Batch, collate, collate_packed
from llama.finetune.data.batches import Batches, StepSize, eval_batches
from llama.finetune.data.corpus import Corpus, Example, Part
from llama.finetune.data.load import ON_BAD_LINE, load, source_of
from llama.finetune.data.sample import show
from llama.finetune.data.store import Refused
from llama.finetune.data.templates import TEMPLATES

__all__ = [
    "NO_LOSS",
    "ON_BAD_LINE",
    "TEMPLATES",
    "Batch",
    "Batches",
    "Corpus",
    "Example",
    "Part",
    "Refused",
    "StepSize",
    "collate",
    "collate_packed",
    "eval_batches",
    "load",
    "show",
    "source_of",
]
