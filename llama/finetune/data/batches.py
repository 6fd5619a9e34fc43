"""The batches that a run makes of its examples.

[Note: the order of the data]
Every epoch has its own permutation of the examples, drawn from (seed, epoch), and its own rows: an
example each, or several packed. An epoch of R rows takes ceil(R / global_batch) steps, and the rows
that its last step lacks are blank, without targets; the next epoch begins with the next step. So a
batch is a function of the step alone, however long the run: a resumed run needs no state but its
step, one that was to end with an epoch can go on with the next, nothing is dropped at the end of
an epoch, and any number of ranks share out the same global batch.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from llama.finetune.data.batch import Batch, collate, collate_packed
from llama.finetune.data.corpus import Corpus, Example
from llama.finetune.data.order import Order
from llama.finetune.data.packing import Rows, alone, pack

WIDTH_MULTIPLE = 8  # batches come in few widths, and those suit matrix units


class StepSize(NamedTuple):
    """What a global batch holds, over all ranks."""

    targets: int  # tokens that bear loss: what a summed loss is divided by
    tokens: int  # positions that are not padding
    squares: int  # the sum of the squares of the documents' positions, as attention takes


class Batches:
    """One rank's share of every optimizer step's global batch (see [Note: the order of the data]).

    Rank r of W takes rows r, r + W, r + 2W ... of `global_batch` rows. `pack_to` packs examples
    into rows of at most so many positions; None gives each a row. Raises ValueError if W does not
    divide `global_batch`, if there are no examples, and for an example longer than `pack_to`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        global_batch: int,
        seed: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        pack_to: int | None = None,
    ) -> None:
        _check_rank(rank, world_size)
        if not len(examples):
            raise ValueError("there are no examples to make batches of")
        if global_batch < 1 or global_batch % world_size:
            raise ValueError(
                f"a global batch of {global_batch} sequences cannot be shared evenly by "
                f"{world_size} ranks: use a multiple of {world_size}"
            )
        self.corpus = Corpus.of(examples)
        self.global_batch = global_batch
        self.seed = seed
        self.pad_id = pad_id
        self.rank, self.world_size = rank, world_size
        self.pack_to = pack_to
        self._order = Order(self.corpus.parts, seed)
        self._positions = _positions(self.corpus, pack_to)
        self._widest = pack_to or int(self._positions.max())
        self._laid_out: tuple[int, Rows] | None = None  # the epoch that was last asked for
        self._row_counts: dict[int, int] = {}
        self._starts = [0]  # steps before each epoch, as far as they are known

    def batch(self, step: int) -> Batch:
        """This rank's (global_batch / world_size, seq) share of step `step`, counted from 0.

        `seq` is the same on every rank: the longest row of the global batch, rounded up to 8 but no
        further than the longest there can be, so that it never exceeds what the model takes.
        """
        rows = self._rows(step)
        longest = max(int(self._positions[row].sum()) for row in rows)
        rounded = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        width = min(rounded, self._widest)
        return _make(
            self.corpus, rows[self.rank :: self.world_size], self.pad_id, width, self.pack_to
        )

    def size(self, step: int) -> StepSize:
        """How much the whole global batch of a step holds, found without reading a token."""
        members = np.concatenate(self._rows(step))
        positions = self._positions[members]
        learnt = self.corpus.learnt[members]
        return StepSize(int(learnt.sum()), int(positions.sum()), int((positions**2).sum()))

    def rows_in_epoch(self, epoch: int) -> int:
        """How many rows the examples of epoch `epoch`, counted from 0, make."""
        if epoch not in self._row_counts:
            packed = self.pack_to is not None
            count = len(self._epoch(epoch)) if packed else self._order.count(epoch)
            self._row_counts[epoch] = count
        return self._row_counts[epoch]

    def steps(self, epochs: float) -> int:
        """The steps of so many epochs: of a part of one, that share of its steps, rounded up.

        Raises ValueError for a number that is not above 0, and for epochs without an example.
        """
        if not 0 < epochs < math.inf:
            raise ValueError(f"{epochs} epochs are none: use a number above 0")
        exact = Fraction(repr(float(epochs)))  # the number that was written: 0.1 of 10 steps is 1
        whole = math.floor(exact)
        steps = self._start(whole)
        if exact > whole:
            steps += math.ceil((exact - whole) * self._steps_in_epoch(whole))
        if not steps:
            raise ValueError(f"{epochs} epochs hold no example: raise the epochs or the weights")
        return steps

    def _rows(self, step: int) -> list[np.ndarray]:
        """The examples of each row of the global batch, by their numbers; none in a blank row."""
        if step < 0:
            raise ValueError(f"step {step} is negative: steps count from 0")
        epoch = self._epoch_at(step)
        of_epoch = self._epoch(epoch)
        first = (step - self._start(epoch)) * self.global_batch
        end = first + self.global_batch
        rows = [of_epoch[at] for at in range(first, min(end, len(of_epoch)))]
        return rows + [np.empty(0, np.int64)] * (self.global_batch - len(rows))

    def _steps_in_epoch(self, epoch: int) -> int:
        return -(-self.rows_in_epoch(epoch) // self.global_batch)

    @property
    def _epochs_are_alike(self) -> bool:
        """Whether all epochs have equally many rows."""
        return self.pack_to is None and self._order.uniform

    def _start(self, epoch: int) -> int:
        """How many steps there are before an epoch."""
        if self._epochs_are_alike:
            return epoch * self._steps_in_epoch(0)
        while len(self._starts) <= epoch:
            last = len(self._starts) - 1
            self._starts.append(self._starts[-1] + self._steps_in_epoch(last))
        return self._starts[epoch]

    def _epoch_at(self, step: int) -> int:
        if self._epochs_are_alike:
            return step // self._steps_in_epoch(0)
        while self._starts[-1] <= step:
            self._start(len(self._starts))
        return bisect.bisect_right(self._starts, step) - 1

    def _epoch(self, epoch: int) -> Rows:
        if self._laid_out is None or self._laid_out[0] != epoch:
            examples = self._order.examples(epoch)
            self._laid_out = epoch, _lay_out(examples, self._positions, self.pack_to)
        return self._laid_out[1]


def eval_batches(
    examples: Sequence[Example],
    batch_size: int,
    pad_id: int,
    rank: int = 0,
    world_size: int = 1,
    pack_to: int | None = None,
) -> Iterator[Batch]:
    """Every example once over all ranks, at most `batch_size` rows a rank at a time.

    All ranks get equally many batches, of the same shapes, as a sharded model hangs otherwise: a
    rank that runs short gets rows without targets. So sum losses and targets over the ranks before
    dividing; a mean of one batch may be 0 / 0. Raises ValueError for a `batch_size` below 1, and
    for an example longer than `pack_to`.
    """
    _check_rank(rank, world_size)
    if batch_size < 1:
        raise ValueError(f"a batch size of {batch_size} makes no batch: use 1 or more")
    corpus = Corpus.of(examples)
    positions = _positions(corpus, pack_to)
    laid_out = _lay_out(np.arange(len(corpus)), positions, pack_to)

    def batches() -> Iterator[Batch]:
        at_once = batch_size * world_size
        for begin in range(0, len(laid_out), at_once):
            rows = [laid_out[at] for at in range(begin, min(begin + at_once, len(laid_out)))]
            width = max(int(positions[row].sum()) for row in rows)
            rows += [np.empty(0, np.int64)] * (-len(rows) % world_size)
            yield _make(corpus, rows[rank::world_size], pad_id, width, pack_to)

    return batches()


def _positions(corpus: Corpus, pack_to: int | None) -> np.ndarray:
    """Positions that each example takes; ValueError for one that does not fit in a row."""
    positions = np.maximum(corpus.lengths - 1, 1)
    if pack_to is not None and len(positions) and positions.max() > pack_to:
        longest = int(positions.argmax())
        raise ValueError(
            f"example {longest + 1} has {positions[longest]} positions, more than the {pack_to} "
            "of a packed row: pack to more, or load with a shorter sequence length"
        )
    return positions


def _lay_out(examples: np.ndarray, positions: np.ndarray, pack_to: int | None) -> Rows:
    return alone(examples) if pack_to is None else pack(examples, positions[examples], pack_to)


def _make(
    corpus: Corpus, rows: Sequence[np.ndarray], pad_id: int, width: int, pack_to: int | None
) -> Batch:
    members = [[corpus[at] for at in row.tolist()] for row in rows]
    if pack_to is not None:
        return collate_packed(members, pad_id, width)
    blank = Example([pad_id, pad_id], [0, 0])
    return collate([row[0] if row else blank for row in members], pad_id, width)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks, counted from 0")
