"""After an exception training goes on right; deleted models leave no memory; nothing grows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from parity import Case, rows_of
from parity_model import VOCAB, build
from torch import nn

from minifsdp import fully_shard


class Fault(Exception):
    """What the tests raise."""


class Switch(torch.autograd.Function):
    """Identity that can raise in backward."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed["backward"]:
            raise Fault
        return grad, None


def sharded(armed: dict[str, bool]) -> nn.Module:
    model = build(Case())
    middle = model.layers[1]
    forward = middle.forward

    def failing(x, *args):
        if armed["forward"]:
            raise Fault
        return forward(Switch.apply(x, armed), *args)

    middle.forward = failing
    for block in model.layers:
        fully_shard(block)
    return fully_shard(model)


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randint(0, VOCAB, (2, 8), generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step).flatten())


def _train(fail: str | None, reset: bool) -> list[torch.Tensor]:
    armed = {"forward": False, "backward": False}
    model = sharded(armed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        if fail and step == 2:
            armed[fail] = True
            with pytest.raises(Fault):
                loss_of(model, step).backward()
            armed[fail] = False
            if reset:
                model.reset_iter_state()
            optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [rows for _, rows in rows_of(model, "")]


def _recovers(where: str, reset: bool) -> None:
    undisturbed, disturbed = _train(None, False), _train(where, reset)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset_iter_state", "simply the next step"])
def test_training_goes_on_bit_for_bit_after_an_exception(run_ranks, where, reset):
    for world_size in (1, 2):
        run_ranks(world_size, _recovers, where, reset)


def _reset_on_a_child() -> None:
    model = sharded({"forward": False, "backward": False})
    loss_of(model, 0)
    with pytest.raises(RuntimeError, match="outermost module"):
        model.layers[0].reset_iter_state()


def test_reset_iter_state_is_for_the_root(run_ranks):
    run_ranks(1, _reset_on_a_child)


def _live_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            try:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # a DTensor has none of its own
    return sum(storages.values())


def _delete() -> None:
    gc.collect()
    gc.disable()
    try:
        model = build(Case())
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        loss_of(model, 0).backward()
        loss_of(model, 1)  # leaves the root whole
        full = [weakref.ref(p) for p in model._unit().params]
        storages = [p().unsharded.untyped_storage() for p in full]
        assert any(s.nbytes() for s in storages) or dist.get_world_size() == 1
        unit = weakref.ref(model.layers[0]._unit())
        del storages, model
        assert unit() is None
        assert all(ref() is None for ref in full)
    finally:
        gc.enable()


def test_deleting_the_model_frees_it_without_the_garbage_collector(run_ranks):
    run_ranks(2, _delete)


def _grow() -> list[int]:
    model = sharded({"forward": False, "backward": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = []
    for step in range(200):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step)
        loss_of(model, step)  # a forward that no backward follows
        if step in (20, 100, 199):
            gc.collect()
            counts += [len(gc.get_objects()), _live_bytes()]
    return counts[2:]  # the first look at every object makes some itself


def test_nothing_grows_over_200_steps(run_ranks):
    for objects, size, objects_later, size_later in run_ranks(2, _grow):
        assert objects_later <= objects + 50
        assert size_later <= size + 1024
