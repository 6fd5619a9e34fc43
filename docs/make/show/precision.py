"""Shown on the page about precision."""

from __future__ import annotations

import struct
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import fsdp as upstream

import minifsdp
from minifsdp import MixedPrecisionPolicy, events, fully_shard
from minifsdp.collectives import ring
from minifsdp.scaling import scaling

from ..build import drawn_from
from ..model import Model, batch, build
from ..ranks import on


def bits(value: float) -> str:
    """A float32 in hexadecimal: sign and exponent, then the fraction."""
    return f"0x{struct.unpack('>I', struct.pack('>f', value))[0]:08x}"


@on(2)
def dtypes() -> list[tuple[str, str]]:
    """What has which dtype where, read off a step under bf16 with reductions in fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = build(mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    block, found, sent = model.blocks[1], [], {}

    def hear(event: events.Event) -> None:
        if event.unit == "blocks.1":
            sent[event.kind] = event.nbytes

    def hook(module, args, output) -> None:
        found.append(("input of the block's layer", args[0].dtype))
        found.append(("whole parameter", module.weight.dtype))
        found.append(("output", output.dtype))
        module.weight.register_post_accumulate_grad_hook(
            lambda whole: found.append(("gradient as autograd leaves it", whole.grad.dtype))
        )

    block.up.register_forward_hook(hook)
    found.append(("rows between steps", block.up.weight.dtype))
    with events.listening(hear):
        model(batch()).float().sum().backward()
    slots = 2 * sum(param.to_local().numel() for param in block.parameters())
    optimizer.step()
    if dist.get_rank() == 0:  # which has a full slot of each parameter
        width = {2: torch.bfloat16, 4: torch.float32}
        found.insert(1, ("message of the all-gather", width[sent["all_gather"] // slots]))
        found.append(("message of the reduce-scatter", width[sent["reduce_scatter"] // slots]))
    found.append(("rows of the gradient", block.up.weight.grad.dtype))
    found.append(("optimizer's moments", optimizer.state[block.up.weight]["exp_avg"].dtype))
    return [(what, str(dtype).removeprefix("torch.")) for what, dtype in found]


@drawn_from(dtypes)
def casts(per_rank: list[list[tuple[str, str]]]) -> str:
    lines = ["| what | dtype |", "|---|---|"]
    return "\n".join(lines + [f"| {what} | {dtype} |" for what, dtype in per_rank[0]])


@on(1)
def not_associative() -> None:
    one, tiny = torch.tensor(1.0), torch.tensor(2.0**-24)  # half of one unit in the last place
    print("(1 + tiny) + tiny", bits((one + tiny) + tiny))
    print("1 + (tiny + tiny)", bits(one + (tiny + tiny)))


def orders() -> str:
    lines = ["| rows of | are added in this order |", "|---|---|"]
    for owner in range(3):
        order = ring.summation_order(owner, 3)
        lines.append(f"| rank {owner} | (rank {order[0]} + rank {order[1]}) + rank {order[2]} |")
    return "\n".join(lines)


@on(3)
def sums() -> None:
    mine = [1.0, 2.0**-24, 2.0**-24][dist.get_rank()]
    layer = fully_shard(torch.nn.Linear(1, 3, bias=False))
    layer.set_gradient_divide_factor(1.0)  # the sum, to see its bits
    layer(torch.tensor([[mine]])).sum().backward()  # each row's gradient is `mine`
    print(*(bits(row) for row in layer.weight.grad.to_local().flatten().tolist()))


@on(3)
def gloos() -> None:
    mine = [1.0, 2.0**-24, 2.0**-24][dist.get_rank()]
    row = torch.empty(1)
    dist.reduce_scatter_tensor(row, torch.full((3,), mine))
    print(bits(row.item()))


def spans() -> str:
    """Where the order changes inside pieces whose size is no multiple of a segment's."""
    lines = ["| elements a rank | rank | its elements | in the order of |", "|---:|---:|---|---|"]
    for numel in (1, 31, 32):
        for rank in range(3):
            for start, stop, owner in ring.spans(numel, 3, 4, rank):
                lines.append(f"| {numel} | {rank} | {_range(start, stop)} | rank {owner} |")
    return "\n".join(lines)


def _range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


@on(1)
def division() -> None:
    total = torch.tensor(5.0)
    print("5 / 3      ", bits(total / 3))
    print("5 * (1 / 3)", bits(total * torch.tensor(1 / 3)))


@on(3)
def narrow() -> None:
    mine = [1.0, 2.0**-9, 2.0**-9][dist.get_rank()]
    for reduce_dtype in (torch.bfloat16, torch.float32):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        layer = fully_shard(torch.nn.Linear(1, 3, bias=False), mp_policy=policy)
        layer.set_gradient_divide_factor(1.0)
        layer(torch.tensor([[mine]])).sum().backward()
        row = layer.weight.grad.to_local().item()
        print(f"reduced in {str(reduce_dtype)[6:]:<8}", bits(row), f"1 + {(row - 1) * 512:g}/512")


def factors() -> str:
    lines = [
        "| dtype | ranks | before the sum | the sum becomes | after |",
        "|---|---:|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for ranks in (2, 8):
            s = scaling(dtype, ranks, 1)
            becomes = f"the mean, / {ranks}" if s.average_shards else "the sum"
            cells = [str(dtype)[6:], ranks, _by(s.divide_before), becomes, _by(s.divide_after)]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _by(divisor: float) -> str:
    return "nothing" if divisor == 1 else f"/ {divisor:g}"


@on(2)
def overflow() -> None:
    gradient = torch.tensor(40000.0, dtype=torch.float16)  # the same on two ranks; at most 65504
    print("(g + g) / 2    ", ((gradient + gradient) / 2).item())
    print("g / 2 + g / 2  ", (gradient / 2 + gradient / 2).item())


@on(3)
def both_engines() -> None:
    def train(engine: ModuleType) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model(dim=32, hidden=75)
        policy = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            engine.fully_shard(block, mp_policy=policy)
        engine.fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(3):
            data = batch(100 * step + dist.get_rank(), dim=32)  # other data on each rank
            model(data).float().square().mean().backward()
            seen += [p.grad.to_local().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            seen += [p.detach().to_local().clone() for p in model.parameters()]
        return seen

    ours, theirs = train(minifsdp), train(upstream)
    equal = sum(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    print(f"{equal} of {len(ours)} tensors have FSDP2's bits")


@on(2)
def unsynced() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = build(mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(batch()).float().sum().backward()
    unit = minifsdp.hooks.unit_of(model.blocks[0])
    kept = unit.reducer.held()["gradients"]
    print("param.grad:", model.blocks[0].up.weight.grad, "kept whole:", kept, "bytes")


@on(3)
def norms() -> None:
    model = build()
    for param in model.parameters():
        param.grad = param.detach().clone()
        param.grad.to_local().fill_(3.0)
    rows = [p.grad.to_local() for p in model.parameters()]
    here = torch.stack([r.square().sum() for r in rows]).sum()
    norm = minifsdp.clip_grad_norm_(model.parameters(), max_norm=1.0)
    print(f"squares here {here.item():g}, norm of all {norm.item():.4f}")
