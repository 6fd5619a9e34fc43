"""`minifsdp.verify.compare` finds planted faults, where they are, and none where there is none."""

from __future__ import annotations

import math

import planted_engines as planted
import pytest
import torch
import torch.distributed as dist
import unruly_engines as unruly
from torch import nn

from minifsdp.verify import Difference, Differs, Report, compare
from minifsdp.verify.engines import MiniFSDP
from minifsdp.verify.lane import seed_for


def _compare(engine: str, tied: bool = False, against: tuple[str, ...] = ("fsdp2",), **settings):
    build = planted.build_tied if tied else planted.build
    tested = getattr(unruly if hasattr(unruly, engine) else planted, engine)
    return compare(build, planted.batch, (tested, *against), **{"steps": 3, **settings})


def _found(run_ranks, world_size: int, engine: str, **settings) -> Difference:
    report, *others = run_ranks(world_size, _kept, engine, settings)
    assert all(other.first.looks_like == report.first.looks_like for other in others)
    assert not report.equal and not report.ok
    return report.first


def _kept(engine: str, settings: dict) -> Report:
    return _compare(engine, **settings)


def test_one_wrong_row_is_found_by_step_unit_row_and_owner(run_ranks):
    first = _found(run_ranks, 2, "one_wrong_row")
    assert (first.step, first.phase, first.unit) == (1, "parameter in forward", "layers.1")
    assert (first.parameter, first.row, first.rank) == ("layers.1.up.weight", 5, 1)
    assert first.ulp == 1 and first.values[0] > first.values[1]
    assert first.looks_like.startswith("one row, 5, of layers.1.up.weight")


def test_a_missing_wait_is_found_in_the_unit_that_did_not_wait(run_ranks):
    first = _found(run_ranks, 2, "missing_wait")
    assert (first.step, first.phase, first.unit) == (0, "parameter in forward", "layers.1")
    assert "missing wait" in first.looks_like or "before it was filled" in first.looks_like
    assert "rows were equal before the first step" in first.looks_like


def test_parameters_of_a_step_ago_are_told_as_such(run_ranks):
    first = _found(run_ranks, 2, "stale_gather", steps=2)
    assert (first.step, first.phase, first.unit) == (1, "parameter in forward", "layers.1")
    assert "of a step ago" in first.looks_like


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_skipped_division_is_told_by_its_factor(run_ranks, world_size):
    first = _found(run_ranks, world_size, "skipped_division", steps=1)
    assert (first.step, first.phase, first.unit) == (0, "gradient", "layers.1")
    assert f"every gradient of unit layers.1 is {world_size}x" in first.looks_like
    assert f"division by the number of ranks ({world_size}) is missing" in first.looks_like


def test_a_factor_is_told_where_rounding_hides_its_last_digits(run_ranks):
    settings = {"against": ("none",), "dtype": "bf16", "reduce_dtype": "bf16", "steps": 1}
    first = _found(run_ranks, 4, "skipped_division", **settings)
    assert "every gradient of unit layers.1 is about " in first.looks_like
    assert "division by the number of ranks (4) is missing" in first.looks_like


def test_what_only_one_rank_scales_is_not_called_a_missing_division(run_ranks):
    first = _found(run_ranks, 2, "rank_1_doubled", steps=1)
    assert first.looks_like.startswith("only the rows of rank 1 are 2x the other's")
    assert "division" not in first.looks_like


@pytest.mark.parametrize(
    ("engine", "step", "what"),
    [
        ("rolled_gradient", 0, "layers.1.down.weight: the right values in the wrong places"),
        ("exchanged_gradients", 0, "the gradients of other parameters (layers.1.norm.weight"),
        ("gradient_of_a_step_ago", 1, "the gradients of the step before"),
    ],
)
def test_right_gradients_of_another_time_or_place_are_told(run_ranks, engine, step, what):
    first = _found(run_ranks, 2, engine, steps=2)
    assert (first.step, first.phase, first.unit) == (step, "gradient", "layers.1")
    assert what in first.looks_like and "summed" not in first.looks_like


def test_rows_in_wrong_places_are_told_from_ones_that_had_not_arrived(run_ranks):
    first = _found(run_ranks, 2, "rolled_parameter", steps=1)
    assert "layers.1.down.weight: the right values in the wrong places" in first.looks_like


def test_rows_changed_between_steps_are_not_blamed_on_the_gather_alone(run_ranks):
    first = _found(run_ranks, 2, "changed_between_steps", steps=2)
    assert (first.step, first.phase, first.rank) == (1, "parameter in forward", 1)
    assert "equal after step 0, so they were gathered wrongly or changed since" in first.looks_like


def test_a_division_too_many_is_told_by_its_factor(run_ranks):
    first = _found(run_ranks, 4, "divided_twice", steps=1)
    assert first.phase == "gradient"
    assert "every gradient is 0.25x" in first.looks_like and "once too often" in first.looks_like


def test_one_rank_with_other_data_is_found_by_rank(run_ranks):
    first = _found(run_ranks, 4, "other_data", steps=1)
    assert (first.step, first.phase, first.unit) == (0, "input", "root")
    assert first.rank == 3 and first.seen_by == (3,)
    assert first.looks_like.startswith("only rank 3 computed on other data")


@pytest.mark.parametrize(
    ("engine", "phase", "what"),
    [
        ("bf16_parameters", "parameter in forward", "cast before they were gathered"),
        ("bf16_gradients", "gradient", "rounded before, in or after the reduction"),
        ("bf16_master_weights", "parameter before the first step", "when they were sharded"),
    ],
)
def test_bf16_where_float32_was_meant_is_told(run_ranks, engine, phase, what):
    first = _found(run_ranks, 2, engine, steps=1)
    assert (first.step, first.phase) == (0, phase)
    assert first.looks_like.startswith("all of ours fit bf16 where fp32 was meant")
    assert what in first.looks_like


def test_one_wrong_row_of_a_gradient_is_found_on_its_owner(run_ranks):
    first = _found(run_ranks, 2, "one_wrong_gradient_row", steps=1)
    assert (first.phase, first.parameter) == ("gradient", "layers.1.up.weight")
    assert (first.row, first.rank, first.seen_by, first.ulp) == (5, 1, (1,), 1)
    assert first.looks_like.startswith("one row, 5, of layers.1.up.weight: losses are equal")


def test_a_gradient_handed_out_twice_is_found(run_ranks):
    first = _found(run_ranks, 4, "reduced_twice", steps=1)
    assert (first.phase, first.parameter) == ("gradient", "layers.1.down.weight")
    assert "2x" in first.looks_like and "added twice" in first.looks_like


def test_a_gradient_that_only_one_engine_has_is_found(run_ranks):
    first = _found(run_ranks, 2, "lost_gradient", steps=1)
    assert (first.phase, first.parameter) == ("gradient", "layers.1.up.bias")
    assert "the tested engine lacks this gradient" in first.looks_like
    assert all(math.isnan(value) for value in first.values)


def test_a_lost_micro_batch_is_found_in_its_unit(run_ranks):
    first = _found(run_ranks, 2, "lost_micro_batch", steps=1, accumulate=2)
    assert (first.phase, first.unit) == ("gradient", "layers.1")
    assert "of 2 micro-batches one was lost or counted twice" in first.looks_like


def test_rounding_while_accumulating_is_told_from_a_lost_micro_batch(run_ranks):
    first = _found(run_ranks, 2, "accumulated_in_bf16", steps=1, accumulate=2)
    assert first.phase == "gradient" and "rounded while accumulating" in first.looks_like


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ("ClipsByInfinityNorm", "ours is their infinity norm"),
        ("ClipsWithoutSumming", "local squares were not summed over ranks"),
    ],
)
def test_another_norm_is_recognised(run_ranks, engine, what):
    first = _found(run_ranks, 2, engine, steps=1, clip=0.5)
    assert (first.phase, first.unit, first.parameter) == ("gradient norm", "", None)
    assert what in first.looks_like


def test_a_parameter_that_the_step_did_not_reach_is_found(run_ranks):
    first = _found(run_ranks, 2, "missed_step", steps=1)
    assert (first.step, first.phase) == (0, "parameter after the step")
    assert first.parameter == "layers.1.up.weight"
    assert "as before the step, which did not reach it" in first.looks_like


def test_a_parted_tie_is_found_before_the_first_step(run_ranks):
    first = _found(run_ranks, 2, "parted_tie", steps=1, tied=True)
    assert (first.phase, first.parameter) == ("parameter before the first step", "head.weight")
    assert "was tied to embed.weight" in first.looks_like


def test_how_a_difference_spreads_is_told(run_ranks):
    first = _found(run_ranks, 2, "one_wrong_row")
    in_phase, same_step, next_step = first.spread
    assert "1 row, 1 of unit layers.1's 6 parameters, on all ranks" in in_phase
    assert same_step.startswith("elements differing then in step 1: ")
    assert "forward outputs of units" in same_step and "parameters in" not in same_step
    assert "then in step 2: inputs of units" in next_step


# ---- no fault -----------------------------------------------------------------------------------

FAULTLESS = [
    (2, {}, False),
    (2, {"dtype": "bf16", "reduce_dtype": "fp32", "accumulate": 2, "clip": 0.1}, True),
    (4, {"dtype": "bf16", "clip": 0.1, "offload": True}, False),
]


@pytest.mark.parametrize(("world_size", "settings", "tied"), FAULTLESS)
def test_without_a_fault_every_bit_is_equal(run_ranks, world_size, settings, tied):
    for report in run_ranks(world_size, _kept, "no_fault", {**settings, "tied": tied, "steps": 2}):
        report.raise_if_different()
        assert report.equal and report.first is None


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", [(None, None), ("bf16", "fp32"), ("bf16", None), ("fp16", None)])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("offload", [False, True])
def test_without_a_fault_there_is_none_in_any_setting(
    run_ranks, world_size, dtypes, accumulate, clip, offload
):
    settings = {
        "dtype": dtypes[0],
        "reduce_dtype": dtypes[1],
        "accumulate": accumulate,
        "clip": clip,
        "offload": offload,
        "against": ("fsdp2", "fsdp1", "ddp", "none"),
    }
    report = run_ranks(world_size, _kept, "no_fault", settings)[0]
    report.raise_if_different()
    assert report.comparisons[0].equal


def test_sums_in_another_order_are_within_rounding_and_not_called_equal(run_ranks):
    against = ("fsdp2", "fsdp1", "ddp", "none")
    settings = {"against": against, "clip": 0.1, "steps": 2}
    report = run_ranks(4, _kept, "no_fault", settings)[0]
    report.raise_if_different()
    assert report.ok and not report.equal
    exact, *others = report.comparisons
    assert exact.equal and exact.verdict == "EQUAL BITS"
    for comparison in others:
        assert not comparison.equal and comparison.verdict.startswith("within rounding")
        by_phase = {phase.phase: phase for phase in comparison.phases}
        assert by_phase["parameters before the first step"].equal
        assert 0 < by_phase["gradients"].rounding < 1


def test_a_fault_is_beyond_rounding_too(run_ranks):
    settings = {"against": ("none",), "steps": 2}
    report = run_ranks(2, _kept, "bf16_gradients", settings)[0]
    assert not report.ok and report.first.phase == "gradient"
    assert report.comparisons[0].verdict.startswith("BEYOND ROUNDING")


def test_somebodys_engine_is_tested_by_its_function_alone(run_ranks):
    report = run_ranks(2, _kept, "own_fsdp2", {"steps": 2, "against": ("minifsdp",)})[0]
    assert report.equal and report.comparisons[0].ours == "own_fsdp2"


def test_a_wrapper_with_whole_parameters_that_sums_otherwise_passes_if_rounding_is_allowed(
    run_ranks,
):
    strict, allowing = run_ranks(4, _whole_with_rounding)[0]
    assert not strict.ok and "last bits" in strict.first.looks_like
    assert strict.first.phase == "gradient"
    assert allowing.ok and not allowing.equal


def _whole_with_rounding() -> tuple[Report, Report]:
    return _compare("own_ddp", steps=1), _compare("own_ddp", steps=1, rounding=True)


class _Kept(MiniFSDP):
    name = "kept"

    def shard(self, model, units, settings):
        self.model = super().shard(model, units, settings)
        return self.model


def _watched_and_not() -> list[str]:
    """Parameters that differ between a run that was watched and one that was not."""
    engine = _Kept()
    compare(planted.build, planted.batch, (engine, "fsdp2"), steps=3, clip=0.5, seed=4)
    torch.manual_seed(4)
    plain = planted.build()
    model = MiniFSDP().shard(plain, list(plain.layers), planted.Settings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        seed_for(4, dist.get_rank(), step, 0)
        model(**planted.batch(dist.get_rank(), step)).backward()
        MiniFSDP().clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    watched = dict(engine.model.named_parameters())
    return [
        name
        for name, param in model.named_parameters()
        if not torch.equal(param.to_local(), watched[name].to_local())
    ]


def test_watching_changes_no_bit(run_ranks):
    assert run_ranks(2, _watched_and_not) == [[], []]


def test_the_callers_random_numbers_go_on_as_if_nothing_had_been(run_ranks):
    assert run_ranks(2, _draws) == [True, True]


def _draws() -> bool:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    _compare("no_fault", steps=1)
    return torch.equal(torch.rand(2), expected)


# ---- a pytest helper, and mistakes --------------------------------------------------------------


def test_raise_if_different_fails_a_test_with_the_whole_report(run_ranks):
    report = run_ranks(2, _kept, "skipped_division", {"steps": 1})[0]
    with pytest.raises(Differs, match=r"looks like: every gradient of unit layers\.1"):
        report.raise_if_different()


def _complaint(build, batch, engines=("minifsdp", "fsdp2"), **settings) -> str:
    try:
        compare(build, batch, engines, steps=1, **settings)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def _undetermined() -> nn.Module:
    model = planted.build()
    with torch.no_grad():
        model.layers[2].up.bias.copy_(
            torch.rand(9, generator=torch.Generator().manual_seed(_tick()))
        )
    return model


_ticks = 0


def _tick() -> int:
    global _ticks
    _ticks += 1
    return _ticks


def _by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return planted.build()


def _batch_by_chance(rank: int, step: int):
    return {k: torch.randint(0, 11, (3, 5)) for k in ("tokens", "targets")}


def _batch_of_two_ranks(rank: int, step: int):
    return [planted.batch(0, step), planted.batch(1, step)][rank - 1 if rank else 2]


def _complaint_of_the_twin(build, batch) -> str:
    """Where two forwards happened to be equal when they were tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minifsdp.verify.checking.forwards", lambda *_: None)
        return _complaint(build, batch, engines=("minifsdp", "none"))


def _complaints() -> list[str]:
    build, batch = planted.build, planted.batch
    return [
        _complaint(_undetermined, batch),
        _complaint(_by_rank, batch),
        _complaint(build, _batch_by_chance),
        _complaint(build, _batch_of_two_ranks),
        _complaint(lambda: nn.Linear(2, 3), lambda rank, step: torch.ones(1, 2) + rank),
        _complaint(planted.build_chancy, batch),
        _complaint_of_the_twin(planted.build_chancy, batch),
        _complaint(build, batch, world_size=3),
        _complaint(build, batch, units="blocks.*"),
        _complaint(build, batch, dtype="bf16", engines=("minifsdp", "ddp")),
        _complaint(build, batch, dtype="fp32", engines=("minifsdp", "ddp")),
    ]


def test_what_cannot_be_compared_is_refused_on_every_rank_in_a_line(run_ranks):
    for said in run_ranks(2, _complaints):
        build, by_rank, chance, short, loss, chancy, twin, *others = said
        group, units, absent, nothing = others
        assert "build() made another 'layers.2.up.bias' than before" in build
        assert "on rank 1 than on rank 0" in by_rank
        assert "batch(0, 0) gave other values at its second call" in chance
        assert "batch(0, 0) raised IndexError" in short
        assert "the model returns a tensor (1, 3), which is no loss: give loss" in loss
        assert "forward is not the same at each call (first in: forward output of the" in chancy
        assert "forward is not the same at each call" in twin
        assert "world_size is 3 inside a process group of 2" in group
        assert "units 'blocks.*' matches no module; there are embed, layers" in units
        assert "nothing to compare to: DistributedDataParallel casts no parameters" in absent
        assert nothing == "nothing"
        assert all("\n" not in line for line in said)
