"""State in and out: whole dicts a tensor at a time, torch's checkpoints, ours and upstream's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as upstream
from parity import Case
from parity_model import VOCAB, build
from peak import held_during
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import full_state_dict, load_full_state_dict


def sharded(engine: ModuleType = minifsdp, case: Case | None = None, **settings) -> nn.Module:
    model = build(case or Case())
    for block in model.layers:
        engine.fully_shard(block, **settings)
    return engine.fully_shard(model, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, VOCAB, (2, 8), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _whole(rank0_only: bool, tied: bool) -> None:
    case = Case(parameters="tied") if tied else Case()
    plain = build(case).state_dict()
    model = sharded(case=case)
    model(torch.zeros(1, 3, dtype=torch.long))  # leaves the root whole
    state = full_state_dict(model, rank0_only=rank0_only)
    if rank0_only and dist.get_rank():
        assert state == {}
        return
    assert list(state) == list(plain)
    for name, tensor in state.items():
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        assert torch.equal(tensor, plain[name]), name
    state["norm.weight"].zero_()  # a copy: editing it changes no model
    assert model.norm.weight.to_local().all()
    if tied:
        assert state["output.weight"] is state["tok_embeddings.weight"]


@pytest.mark.parametrize("rank0_only", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_full_state_is_the_plain_models(run_ranks, rank0_only, tied):
    for world_size in (1, 3):
        run_ranks(world_size, _whole, rank0_only, tied)


def _loaded(everywhere: bool, hsdp: bool) -> None:
    settings = {}
    if hsdp:
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
    source = build(Case())
    with torch.no_grad():
        for p in source.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    model = sharded(**settings)
    state = source.state_dict() if everywhere or dist.get_rank() == 0 else None
    load_full_state_dict(model, state)
    back = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(back[name], tensor) for name, tensor in source.state_dict().items())


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on rank 0"])
@pytest.mark.parametrize(("world_size", "hsdp"), [(1, False), (3, False), (4, True)])
def test_a_full_state_is_loaded(run_ranks, everywhere, world_size, hsdp):
    run_ranks(world_size, _loaded, everywhere, hsdp)


def _buffers() -> None:
    model = nn.BatchNorm1d(4)
    minifsdp.fully_shard(model)
    model.running_mean.fill_(float(dist.get_rank()))
    state = {name: torch.full_like(t, 3) for name, t in nn.BatchNorm1d(4).state_dict().items()}
    load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    assert (model.running_mean == 3).all() and model.num_batches_tracked == 3


def test_buffers_come_from_rank_0_too(run_ranks):
    run_ranks(2, _buffers)


def _narrower() -> None:
    model = sharded()
    whole = full_state_dict(model, rank0_only=False)
    narrow = {name: (tensor + 1).to(torch.bfloat16) for name, tensor in whole.items()}
    load_full_state_dict(model, narrow if dist.get_rank() == 0 else None)
    for name, tensor in full_state_dict(model, rank0_only=False).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, narrow[name].float()), name


def test_a_state_of_another_dtype_is_cast_before_its_rows_are_sent(run_ranks):
    run_ranks(2, _narrower)


def _held_by_others() -> float:
    """What a rank holds at most while rank 0 gets the full state, in largest tensors."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    minifsdp.fully_shard(model)
    held = held_during(lambda: full_state_dict(model))
    return held.peak / (4 * 256 * 256)


def test_ranks_that_keep_nothing_hold_one_whole_tensor_at_a_time(run_ranks):
    first, second = run_ranks(2, _held_by_others)
    assert second < 4 < 6 < first  # torch takes three for one to be gathered


def _refused() -> None:
    model = sharded()
    before = full_state_dict(model, rank0_only=False)
    state = {name: tensor + 1 for name, tensor in before.items()}
    missing = {n: t for n, t in state.items() if n != "norm.weight"}
    larger = dict(state, **{"norm.weight": torch.ones(31)})
    unknown = dict(state, extra=torch.ones(1))
    first = dist.get_rank() == 0
    for bad, words in (
        (missing, "norm.weight: missing from the state"),
        (larger, r"norm.weight: \(31,\) in the state, \(30,\) in the model"),
        (unknown, "extra: not in the model"),
    ):
        with pytest.raises(ValueError, match=words):
            load_full_state_dict(model, bad if first else None)
    with pytest.raises(ValueError, match="ranks bring different states"):
        load_full_state_dict(model, state if first else missing)
    with pytest.raises(ValueError, match="rank 0 has no state"):
        load_full_state_dict(model, None if first else state)
    after = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(run_ranks):
    run_ranks(2, _refused)


def _interchange(folder: str, saver: str, loader: str) -> None:
    engines = {"ours": minifsdp, "upstream": upstream}
    source = sharded(engines[saver])
    optimizer = adamw(source)
    train(source, optimizer, range(2))
    state = {
        "model": get_model_state_dict(source),
        "optimizer": get_optimizer_state_dict(source, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    target = sharded(engines[loader])
    target_optimizer = adamw(target)
    state = {
        "model": get_model_state_dict(target),
        "optimizer": get_optimizer_state_dict(target, target_optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(target, state["model"])
    set_optimizer_state_dict(target, target_optimizer, state["optimizer"])
    train(source, optimizer, range(2, 4))
    train(target, target_optimizer, range(2, 4))
    for (name, a), b in zip(source.named_parameters(), target.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name


@pytest.mark.parametrize(
    ("saver", "loader"), [("ours", "ours"), ("upstream", "ours"), ("ours", "upstream")]
)
def test_torchs_checkpoints_pass_between_the_engines(run_ranks, saver, loader):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(3, _interchange, str(Path(folder, "state")), saver, loader)
