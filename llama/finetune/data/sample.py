"""An example as a person can read it."""

import itertools
import shutil
import textwrap

from llama.finetune.data.corpus import Example
from llama.tokenizer import Tokenizer

LABELS = {False: "given ", True: "learnt"}


def show(example: Example, tokenizer: Tokenizer) -> str:
    """The pieces of an example with their ids, in stretches that are given or learnt.

    Pieces are as the tokenizer writes them, a space as U+2581; the first token is always given,
    since nothing precedes it.
    """
    ids = [int(i) for i in example.ids]
    learnt = [bool(mask) and at > 0 for at, mask in enumerate(example.loss_mask)]
    width = max(40, shutil.get_terminal_size().columns)
    lines = [f"{len(ids)} tokens, {sum(learnt)} of them learnt"]
    for bears_loss, stretch in itertools.groupby(zip(ids, learnt, strict=True), lambda x: x[1]):
        pieces = " ".join(f"{_printable(tokenizer.piece(i))}:{i}" for i, _ in stretch)
        label = f"{LABELS[bears_loss]} | "
        lines += textwrap.wrap(
            pieces,
            width,
            initial_indent=label,
            subsequent_indent=" " * len(LABELS[bears_loss]) + " | ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _printable(piece: str) -> str:
    """A piece in one line and without what a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)
    return shown.replace(" ", "\u2581")
