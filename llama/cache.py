"""The keys and values of a generation in progress, kept apart from the model that made them."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One layer's keys and values, `(batch, n_kv_heads, length, head_dim)`, in a fixed buffer."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' keys and values and returns those of all tokens so far."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None:
            # Made here, not in __init__: only now are dtype and device of the activations known.
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """What one batch of sequences has computed so far: one `LayerCache` a layer.

    `capacity` is the most tokens a row can hold. `padding`, `(batch,)` integers, is how many tokens
    of padding stand to the left of each row: they take no position and nobody attends to them.
    """

    def __init__(self, n_layers: int, capacity: int, padding: Tensor | None = None) -> None:
        self.capacity = capacity
        self.padding = padding
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens held for each row, padding included."""
        return self.layers[0].length

    def positions(self, seq: int, device: torch.device) -> Tensor:
        """Positions of the next `seq` tokens: `(seq,)`, or `(batch, seq)` if rows are padded."""
        if self.length + seq > self.capacity:
            raise ValueError(
                f"KVCache: {self.length} tokens held and {seq} new exceed its capacity of "
                f"{self.capacity}"
            )
        positions = torch.arange(self.length, self.length + seq, device=device)
        if self.padding is None:
            return positions
        return (positions - self.padding[:, None]).clamp(min=0)

    def mask(self, seq: int, device: torch.device) -> Tensor | None:
        """Which keys the next `seq` tokens attend to, `(batch or 1, 1, seq, length + seq)` bool;
        None where plain causal attention says the same."""
        if self.padding is None and (self.length == 0 or seq == 1):
            return None
        key = torch.arange(self.length + seq, device=device)
        query = key[self.length :, None]
        mask = (key <= query)[None]
        if self.padding is not None:
            # Padding attends to itself alone: a row with nothing to attend to would be NaN.
            mask = mask & (key >= self.padding[:, None, None]) | (key == query)
        return mask[:, None]
