"""Examples as the tensors that a model takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llama.finetune.data.corpus import Example
from llama.head import NO_LOSS


@dataclass(frozen=True, eq=False)
class Batch:
    """`tokens` and `targets`, both (batch, seq) int64, right-padded.

    A target is the token that follows, or -100 where there is no loss: logits and targets align.
    `documents` are the lengths of each row's documents, in positions, which make up the row: the
    last one is padding where the row is not full. None: each row is one document and its padding.
    """

    tokens: Tensor
    targets: Tensor
    documents: list[list[int]] | None = None

    def split(self, rows: int) -> list["Batch"]:
        """Batches of `rows` rows, of which the last may have fewer."""
        if rows < 1:
            raise ValueError(f"a part of {rows} rows holds nothing: use 1 or more")
        parts = range(0, len(self.tokens), rows)
        return [
            Batch(
                self.tokens[at : at + rows],
                self.targets[at : at + rows],
                None if self.documents is None else self.documents[at : at + rows],
            )
            for at in parts
        ]


def positions(example: Example) -> int:
    """Positions a model sees: all tokens but the last, which nothing follows."""
    return max(1, len(example.ids) - 1)


def collate(examples: Sequence[Example], pad_id: int, width: int | None = None) -> Batch:
    """One row an example, padded to `width` positions, by default those of the longest example."""
    width = width or max(positions(example) for example in examples)
    return Batch(*_fill([[example] for example in examples], pad_id, width))


def collate_packed(rows: Sequence[Sequence[Example]], pad_id: int, width: int) -> Batch:
    """Rows of examples one behind another, padded to `width` positions; a row may have none."""
    documents = [[positions(example) for example in row] for row in rows]
    for row in documents:
        if sum(row) < width:
            row.append(width - sum(row))
    return Batch(*_fill(rows, pad_id, width), documents)


def _fill(rows: Sequence[Sequence[Example]], pad_id: int, width: int) -> tuple[Tensor, Tensor]:
    tokens = np.full((len(rows), width), pad_id, np.int64)
    targets = np.full((len(rows), width), NO_LOSS, np.int64)
    for row, examples in enumerate(rows):
        at = 0
        for ids, loss_mask in examples:
            end = at + len(ids) - 1
            tokens[row, at:end] = ids[:-1]
            targets[row, at:end] = ids[1:]
            targets[row, at:end][np.asarray(loss_mask[1:]) == 0] = NO_LOSS
            at = max(end, at + 1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)
