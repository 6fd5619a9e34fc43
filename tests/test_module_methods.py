"""The methods that a sharded module has: those of upstream's class, name by name."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import FSDPModule, MixedPrecisionPolicy, events
from minifsdp.collectives import use_collectives


class Net(nn.Module):
    """Three layers with uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


def build(engine: ModuleType = minifsdp, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for block in (model.embed, model.middle, model.head):
        engine.fully_shard(block, **settings)
    return engine.fully_shard(model, **settings)


def units(model: nn.Module) -> list[nn.Module]:
    return [model, model.embed, model.middle, model.head]


def tokens(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 7, (4,), generator=generator)


def gradients(model: nn.Module, steps: int = 1) -> list[torch.Tensor]:
    for step in range(steps):
        model(tokens(step)).float().square().mean().backward()
    for unit in units(model):  # where a setting keeps parameters whole
        unit.reshard()
    return [p.grad.to_local().clone() for p in model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_public_method_of_upstreams_class_is_here_with_its_parameters():
    for name, method in inspect.getmembers(upstream.FSDPModule, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(FSDPModule, name)).parameters
        theirs = inspect.signature(method).parameters
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()], name


def test_fully_shard_has_upstreams_keywords():
    ours = inspect.signature(minifsdp.fully_shard).parameters
    assert list(ours) == list(inspect.signature(upstream.fully_shard).parameters)


@pytest.mark.parametrize(
    "method",
    [
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_symm_mem_for_comm",
        "set_allocate_memory_from_process_group_for_comm",
    ],
)
def test_what_is_not_supported_is_refused_by_name(run_ranks, method):
    run_ranks(1, _refused, method)


def _refused(method: str) -> None:
    with pytest.raises(NotImplementedError, match=method):
        getattr(build(), method)(True)


def _hook(how: str) -> None:
    with use_collectives(how):
        _hooked()


def _hooked() -> None:
    seen: list[torch.Tensor] = []
    model = build()
    for unit in (model.head, model.middle):
        unit.set_all_reduce_hook(lambda rows: seen.append(rows.clone()) or rows.mul_(3))
    plain = gradients(build(), steps=3)  # leaves buffers that are not zero behind
    hooked = gradients(model, steps=3)
    size, rank = dist.get_world_size(), dist.get_rank()
    head, middle = seen[:2]
    assert (head.numel(), middle.numel()) == ((-(-3 // size)) * 6, (-(-5 // size)) * 6)
    for index, (name, _) in enumerate(model.named_parameters()):
        factor = 1 if name.startswith("embed") else 3
        torch.testing.assert_close(hooked[index], plain[index] * factor)
    if size == 3 and rank == 2:  # 2, 2 and 1 of five rows: the rest of the slot is padding
        assert all(not rows[5:10].any() for rows in seen[1::2])
    if size == 4 and rank == 3:  # one of three rows for each rank but the last
        assert all(not rows.any() for rows in seen[::2])


def test_an_all_reduce_hook_sees_the_rows_with_zeros_for_padding_and_may_change_them(run_ranks):
    for world_size in (1, 2, 3, 4):
        for how in ("shared", "direct"):
            run_ranks(world_size, _hook, how)


def _hook_stream_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="2-D mesh"):
        build(mesh=mesh).set_all_reduce_hook(lambda rows: None, stream=object())


def test_a_stream_for_the_hook_is_refused_on_two_axes(run_ranks):
    run_ranks(2, _hook_stream_on_two_axes)


def _changes_no_bit(method: str, *args: object) -> None:
    reference = gradients(build(upstream), steps=2)
    model = build()
    for unit in units(model):
        getattr(unit, method)(*args)
    assert equal(gradients(model, steps=2), reference)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("set_separate_reduce_scatter_group", ()),
        ("set_reduce_scatter_max_input_buffers", (3,)),
        ("set_force_sum_reduction_for_comms", (True,)),
        ("set_post_optim_event", (None,)),
        ("set_reshard_after_backward", (False,)),
        ("set_reshard_after_forward", (False,)),
    ],
)
def test_settings_that_are_about_speed_change_no_bit(run_ranks, method, args):
    run_ranks(3, _changes_no_bit, method, *args)


def _own_group() -> None:
    model = build()
    model.set_separate_reduce_scatter_group()
    groups = {unit._unit().reducer.peers.group for unit in units(model)}
    assert len(groups) == 1 and groups != {model._unit().home.shards.group}
    model.set_separate_reduce_scatter_group(False)
    assert {u._unit().reducer.peers.group for u in units(model)} == {
        model._unit().home.shards.group
    }


def test_reductions_may_have_a_process_group_of_their_own(run_ranks):
    run_ranks(2, _own_group)


def _buffers() -> None:
    model = build()
    for wrong, error in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="True or False"):
        model.set_reshard_after_forward(2)


def test_bad_values_are_refused(run_ranks):
    run_ranks(1, _buffers)


def _reductions_under_way(limit: int) -> int:
    use_collectives("direct")  # whose reductions overlap with computing
    model = build()
    model.set_reduce_scatter_max_input_buffers(limit)
    model(tokens())
    under_way, most = 0, 0

    def follow(event: events.Event) -> None:
        nonlocal under_way, most
        under_way += {"reduce_scatter": 1, "reduced": -1}.get(event.kind, 0)
        most = max(most, under_way)

    with events.listening(follow):
        model(tokens()).sum().backward()
    return most


def test_more_input_buffers_let_more_reductions_be_under_way(run_ranks):
    for limit in (1, 2, 3):
        assert run_ranks(2, _reductions_under_way, limit) == [limit, limit]


def _no_unshard_in_backward() -> list[str]:
    reference = gradients(build())
    model = build()
    model.embed.set_unshard_in_backward(False)
    gathered: list[str] = []

    def follow(event: events.Event) -> None:
        if event.kind == "all_gather":
            gathered.append(event.unit)

    loss = model(tokens()).square().mean()
    with events.listening(follow):
        loss.backward()
    assert equal([p.grad.to_local() for p in model.parameters()], reference)
    return gathered


def test_a_unit_can_be_left_out_of_backwards_gathers(run_ranks):
    assert "embed" not in run_ranks(2, _no_unshard_in_backward)[0]


def _deprecated() -> None:
    model = build()
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        for unit in units(model):
            unit.set_reduce_scatter_divide_factor(8.0)
    scale = dist.get_world_size() / 8.0
    for ours, reference in zip(gradients(model), gradients(build()), strict=True):
        torch.testing.assert_close(ours, reference * scale)


def test_the_deprecated_name_of_the_divide_factor_works_and_says_so(run_ranks):
    run_ranks(2, _deprecated)


def _async() -> None:
    model = build()
    handle = model.middle.unshard(async_op=True)
    model.head.unshard()
    handle.wait()
    handle.wait()
    assert model.middle.weight.shape == (5, 5) and type(model.middle.weight) is nn.Parameter
    model.middle.reshard()
    model.head.reshard()
    assert equal(gradients(model), gradients(build()))


def test_unshard_returns_a_handle_when_asked(run_ranks):
    run_ranks(2, _async)


def _share() -> None:
    minifsdp.share_comm_ctx([build(), build()])
    with pytest.raises(ValueError, match="fully_shard returned"):
        minifsdp.share_comm_ctx([nn.Linear(2, 2)])


def test_share_comm_ctx_takes_sharded_modules_only(run_ranks):
    run_ranks(1, _share)


def _upstreams_policies() -> None:
    ours = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    theirs = upstream.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    offload = upstream.CPUOffloadPolicy(pin_memory=False)
    a = gradients(build(mp_policy=ours))
    assert equal(a, gradients(build(mp_policy=theirs, offload_policy=offload)))
    assert equal(a, gradients(build(upstream, mp_policy=theirs)))


def test_upstreams_policy_objects_are_taken(run_ranks):
    run_ranks(2, _upstreams_policies)
