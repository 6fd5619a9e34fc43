"""Which examples an epoch has, and in what order.

[Note: weights]
A source of n examples and weight w has a stream of its own: permutations of its examples without
end. Epoch e takes from it those from floor(e n w) to floor((e + 1) n w), so that over the epochs
every example is seen w times each on average, and never once more than another but within a
permutation that is under way. What all sources give an epoch is shuffled together.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from llama.finetune.data.corpus import Part


class Order:
    """The examples of every epoch; ValueError if an epoch would hold less than one on average."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self._parts = parts
        self._seed = seed
        # The number that was written, and not the nearest one that a float can be.
        self._shares = [part.count * Fraction(repr(float(part.weight))) for part in parts]
        self.uniform = all(part.weight == 1 for part in parts)
        if sum(self._shares) < 1:
            raise ValueError("an epoch would hold less than one example: raise the weights")

    def count(self, epoch: int) -> int:
        """How many examples epoch `epoch`, counted from 0, has."""
        ranges = [self._range(share, epoch) for share in self._shares]
        return sum(end - begin for begin, end in ranges)

    def examples(self, epoch: int) -> np.ndarray:
        """The examples of an epoch in order, as their numbers, int64."""
        if self.uniform:
            return permutation(sum(part.count for part in self._parts), self._seed, epoch)
        taken = [
            part.first + self._take(number, part.count, *self._range(share, epoch))
            for number, (part, share) in enumerate(zip(self._parts, self._shares, strict=True))
        ]
        together = np.concatenate(taken)
        return together[permutation(len(together), self._seed, epoch)]

    @staticmethod
    def _range(share: Fraction, epoch: int) -> tuple[int, int]:
        return math.floor(epoch * share), math.floor((epoch + 1) * share)

    def _take(self, part: int, count: int, begin: int, end: int) -> np.ndarray:
        """Places `begin` to `end` of a part's stream of permutations."""
        pieces = [np.empty(0, np.int64)]
        for number in range(begin // count, -(-end // count)):
            first = number * count
            places = slice(max(begin - first, 0), min(end - first, count))
            pieces.append(permutation(count, self._seed, number, part + 1)[places])
        return np.concatenate(pieces)


def permutation(count: int, seed: int, *key: int) -> np.ndarray:
    """A permutation of `count` numbers drawn from the seed and the key, as it has always been."""
    entropy = np.random.SeedSequence(seed % 2**64, spawn_key=key)  # it takes no negative seed
    # The generator that numpy has frozen: a run may be resumed under another version of it.
    return np.random.RandomState(np.random.MT19937(entropy)).permutation(count)
