"""What must be equal, how nearly, and what is wrong.

[Note: what must be equal, and how nearly]
Rounding to bfloat16 is exact to `ROUNDING` of a number. Ranks that train on the same row have
equal gradients, whose mean is exact: losses, gradients, norm and updated parameters must be the
whole model's on that row, bit for bit. Ranks with a row each round two gradients and their sum; a
whole model that takes one row after the other and halves the sum rounds the same three times: bit
for bit again. One that takes both rows at once rounds its gradients once, and its products may sum
in another order. Four roundings that know nothing of each other add up to twice one, so each
parameter's gradients may be `SEVERAL` roundings of their norm apart, and norms, over which such
errors average out, one. Over all 2.2e9 numbers, and over the losses, they average out more: a
sixteenth.

[Note: the most a rank holds]
Backward of a block holds the block and, at its end, all its gradients: twice the block. Units that
are done by then, the head and the blocks above, have left their reduced rows: a share of
`1 / ranks`. With the shard of all parameters that is the peak, in the first block. Messages go
through mailboxes of 4 KiB and 512 KiB a rank and take no memory else; activations of 16 tokens and
rotary tables are 6 MB, the root's norm 16 KB. A hundredth is allowed for these.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from torch import nn

from llama import LlamaConfig

from .work import RANKS, VARIANTS, Job, on_meta

ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16
SEVERAL = 2
AVERAGED = ROUNDING / 16
PLAN_TOLERANCE = 0.02
MAILBOX_BYTES = 2**12 + 2**19  # of a rank; every rank maps all
MOST_BYTES = 20 * 2**30  # resident in all processes together


def peak_by_formula(config: LlamaConfig) -> dict[str, int]:
    """Bytes of a rank at its peak, by what they are, and their sum."""
    model = on_meta(config)

    def size(module: nn.Module) -> int:
        return sum(p.nbytes for p in module.parameters())

    first, *others = (size(block) for block in model.layers)
    parts = {"shard": size(model) // RANKS, "block": first, "gradients of the block": first}
    parts["rows of gradients before"] = (size(model.output) + sum(others)) // RANKS
    return parts | {"sum": sum(parts.values())}


class Wrong:
    """Collects what is not as it should be, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def unless_equal(self, what: str, ours: Any, expected: Any) -> None:
        if ours == expected:
            return
        if isinstance(ours, dict):
            names = [key for key in {**ours, **expected} if ours.get(key) != expected.get(key)]
            self.lines.append(f"{what}: {', '.join(names)} differ")
        else:
            self.lines.append(f"{what}: {ours} instead of {expected}")

    def unless_at_most(self, what: str, ours: float, limit: float) -> None:
        if not ours <= limit:  # NaN is not
            self.lines.append(f"{what}: {ours:,.6g} is more than {limit:,.6g}")


def judge(job: Job, expected_parameters: int) -> dict[str, Any]:
    """All figures, in bytes and seconds; what is wrong is listed under "wrong"."""
    wrong, whole, plan = Wrong(), job.said("whole"), job.said("plan")
    formula = peak_by_formula(job.config)
    wrong.unless_equal("parameters", whole["parameters"], expected_parameters)
    wrong.unless_at_most("whole model: resident bytes", whole["resident"], MOST_BYTES)
    figures: dict[str, Any] = {"formula_bytes": formula, "plan": plan}
    for variant in VARIANTS:
        ranks = [job.said(f"{variant} {number}") for number in range(RANKS)]
        equal = _bits(variant, ranks, whole, wrong)
        memory = _memory(variant, ranks, plan["shared"], formula["sum"], wrong)
        total = norm({name: [r["squares"][name] for r in ranks] for name in whole["initial"]})
        for number, said in enumerate(ranks):
            what = f"{variant}, rank {number}: shard"
            wrong.unless_equal(what, said["shard"], 2 * expected_parameters // RANKS)
        clipped = ranks[0]["clipped"]  # computed in bfloat16
        what = f"{variant}: relative error of clip_grad_norm_"
        wrong.unless_at_most(what, abs(clipped / total - 1), SEVERAL * ROUNDING)
        figures[variant] = {
            "losses": [said["loss"] for said in ranks],
            "losses_whole": whole[variant]["losses"],
            "grad_norm": total, "grad_norm_whole": norm(whole[variant]["squares"]),
            "clip_grad_norm": clipped,
            "loss_gradients_and_updated_parameters_equal_in_every_bit": equal,
            "seconds_of_steps": [said["seconds"] for said in ranks],
        }  # fmt: skip
        figures[variant] |= memory
    figures["at once"] = _against_both_at_once(job, whole["at once"], wrong)
    figures["whole"] = {"resident_peak_bytes": whole["resident"]}
    figures["whole"]["numbers_moved_by_the_step"] = whole["same row"]["moved"]
    return figures | {"wrong": wrong.lines}


def norm(of_parameters: dict[str, list[float]]) -> float:
    """Of all parameters together, from sums of squares."""
    return math.sqrt(math.fsum(itertools.chain(*of_parameters.values())))


def _bits(variant: str, ranks: list[Any], whole: Any, wrong: Wrong) -> bool:
    """Whether all that must be equal in every bit is."""
    before, expected = len(wrong.lines), whole[variant]
    for number, said in enumerate(ranks):
        first = _of_rank(whole["initial"], number)
        matrices = [name for name in first if "norm" not in name]  # ones hardly move
        still = [name for name in matrices if said["updated"][name] == first[name]]
        pairs = {
            "first weights": (said["initial"], first),
            "matrices that did not move": (still, []),
        }
        pairs["loss"] = said["loss"], expected["losses"][number]
        for what in ("grads", "squares", "updated"):
            pairs[what] = said[what], _of_rank(expected[what], number)
        for what, (ours, theirs) in pairs.items():
            wrong.unless_equal(f"{variant}, rank {number}: {what}", ours, theirs)
    return len(wrong.lines) == before


def _of_rank(of_parameters: dict[str, list[Any]], number: int) -> dict[str, Any]:
    return {name: of_ranks[number] for name, of_ranks in of_parameters.items()}


def _memory(
    variant: str, ranks: list[Any], plan: Any, formula_bytes: int, wrong: Wrong
) -> dict[str, Any]:
    """Peaks, shared mappings included; and messages."""
    for number, said in enumerate(ranks):
        about = f"{variant}, rank {number}: "
        wrong.unless_at_most(f"{about}peak bytes", max(said["peaks"]), 1.01 * formula_bytes)
        wrong.unless_equal(f"{about}bytes of mailboxes", said["mapped"], RANKS * MAILBOX_BYTES)
        for messages in said["messages"]:
            wrong.unless_equal(f"{about}messages", messages, plan["messages"])
    resident = [said["resident"] for said in ranks]
    wrong.unless_at_most(f"{variant}: resident bytes of both", sum(resident), MOST_BYTES)
    # The plan is of any step but the first; mappings are no tensors and not in it.
    peak, mapped = ranks[0]["peaks"][1], ranks[0]["mapped"]
    over_plan = (peak - mapped) / plan["peak"] - 1
    wrong.unless_at_most(f"{variant}: peak over the plan's", abs(over_plan), PLAN_TOLERANCE)
    return {
        "peak_bytes": [said["peaks"] for said in ranks],
        "peak_above_shards_bytes": peak - ranks[0]["shard"],
        "shard_bytes": ranks[0]["shard"], "mapped_bytes": mapped,
        "peak_over_plan_less_1": over_plan, "peak_over_formula_less_1": peak / formula_bytes - 1,
        "resident_peak_bytes": resident, "messages": ranks[0]["messages"][1],
    }  # fmt: skip


def _against_both_at_once(job: Job, whole: Any, wrong: Wrong) -> dict[str, Any]:
    """How far ranks with a row each are from the whole model on both rows at once."""
    ranks = [job.said(f"own rows {number}") for number in range(RANKS)]
    loss = sum(said["loss"] for said in ranks) / RANKS
    ours = {name: [said["squares"][name] for said in ranks] for name in whole["squares"]}
    total, total_whole = norm(ours), norm(whole["squares"])
    errors = {"loss": abs(loss / whole["loss"] - 1), "norm": abs(total / total_whole - 1)}
    for what, error in errors.items():
        wrong.unless_at_most(f"at once: relative error of the {what}", error, AVERAGED)
    of_norms, of_grads = {}, {}
    for name, squares in whole["squares"].items():
        length = math.sqrt(sum(squares))
        of_norms[name] = abs(math.sqrt(sum(ours[name])) / length - 1)
        of_grads[name] = math.sqrt(sum(said["errors"][name] for said in ranks)) / length
        what = f"at once: {name}: relative error of the gradient"
        wrong.unless_at_most(f"{what}'s norm", of_norms[name], ROUNDING)
        wrong.unless_at_most(what, of_grads[name], SEVERAL * ROUNDING)
    return {
        "loss": loss, "loss_whole": whole["loss"], "loss_error": errors["loss"],
        "grad_norm": total, "grad_norm_whole": total_whole, "grad_norm_error": errors["norm"],
        "loss_and_grad_norm_tolerance": AVERAGED,
        "largest_norm_error_of_a_parameter": max(of_norms.values()),
        "norm_of_a_parameter_tolerance": ROUNDING,
        "largest_gradient_error_of_a_parameter": max(of_grads.values()),
        "gradient_tolerance": SEVERAL * ROUNDING,
        "norm_errors": of_norms, "gradient_errors": of_grads,
    }  # fmt: skip
