"""Rung 7: all of it in minifsdp's own calls. torch's FSDP2 takes the same lines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from link import Link
from task import batches, build, loss_of
from torch import nn
from trial import Seen, run

from minifsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from minifsdp.collectives import use_collectives

OFFLOAD = CPUOffloadPolicy(pin_memory=False)
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def train(
    link: Link,
    steps: int,
    precision: MixedPrecisionPolicy = MIXED,
    micro_batches: int = 2,
    offload: OffloadPolicy = OFFLOAD,
) -> Iterator[Seen]:
    use_collectives("direct")  # by isend and irecv, so that the same line carries its messages
    model = nn.Sequential(*build())
    for block in model:
        fully_shard(block, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mp_policy=precision, offload_policy=offload)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    for x, target in batches(link.rank, steps):
        loss = torch.zeros(())
        parts = zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True)
        for at, (part, classes) in enumerate(parts, start=1):
            model.set_requires_gradient_sync(at == micro_batches)
            value = loss_of(model(part), classes)
            value.backward()
            loss += value.detach()
        optimizer.step()
        yield Seen(loss, params)
        optimizer.zero_grad()


if __name__ == "__main__":
    run(train)
