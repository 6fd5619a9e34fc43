"""What is kept, freed and copied: nothing outlives the model, and one rank copies nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import stack
import torch

import minifsdp
from minifsdp import events


class Spy(stack.Block):
    """Keeps a weak reference to each full weight it computed with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [weakref.ref(p) for p in self.parameters()]
        return super().forward(x)


def _what_outlives_the_model(until: str) -> list[str]:
    """Full and sharded parameters alive after `del model`, with no garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = stack.shard(stack.build(Spy))
        watched = {name: weakref.ref(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(stack.batch()).sum()
            if until == "step":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if until == "forward":
            watched["front.weight, whole"] = weakref.ref(model.front.weight)
        for i, layer in enumerate(model.layers):
            watched |= {f"{i} {j}, whole": ref for j, ref in enumerate(layer.seen)}
        del model, optimizer, loss, layer
        return [name for name, ref in watched.items() if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("until", ["forward", "step"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deleting_the_model_frees_its_parameters_without_the_collector(
    run_ranks, world_size, until
):
    assert run_ranks(world_size, _what_outlives_the_model, until) == [[]] * world_size


def _storage_bytes_between_steps() -> dict[str, int]:
    """Bytes of the blocks' full weights while autograd still refers to them, and after a step."""
    model = stack.shard(stack.build(Spy))
    loss = model(stack.batch()).sum()

    def held() -> int:
        seen = [ref() for layer in model.layers for ref in layer.seen]
        return sum(p.untyped_storage().nbytes() for p in seen if p is not None)

    sizes = {"after forward": held()}
    loss.backward()
    return sizes | {"after backward": held()}


def test_resharded_units_hold_no_bytes_though_autograd_refers_to_them(run_ranks):
    assert (
        run_ranks(2, _storage_bytes_between_steps)
        == [{"after forward": 0, "after backward": 0}] * 2
    )


class Placed(stack.Block):
    """Remembers where its first weight lies while it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen_at = self.up.weight.data_ptr()
        return super().forward(x)


def _places_on_one_rank(dtype: torch.dtype | None) -> tuple[bool, int]:
    """Whether weights compute where the shard lies, and how many bytes travel."""
    policy = minifsdp.MixedPrecisionPolicy(dtype)
    model = stack.shard(stack.build(Placed), mp_policy=policy)
    sizes: list[int] = []
    with events.listening(lambda e: sizes.append(e.nbytes)):
        stack.step(model)
    in_place = [b.seen_at == b.up.weight.to_local().data_ptr() for b in model.layers]
    assert len(set(in_place)) == 1
    return in_place[0], sum(sizes)


def test_one_rank_copies_no_parameter_that_needs_no_cast(run_ranks):
    assert run_ranks(1, _places_on_one_rank, None) == [(True, 0)]
    assert run_ranks(1, _places_on_one_rank, torch.bfloat16) == [(False, 0)]
