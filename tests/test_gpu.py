"""On a CUDA device, with `pytest -m gpu`: what only a GPU does. The logic is tested on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import Case
from parity_model import VOCAB, build
from torch import nn

from minifsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    offload,
    step_in_backward,
)
from minifsdp.trace import record

BF16 = torch.bfloat16
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """A process group of this process alone, on NCCL and gloo."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
        logits = model(tokens[:, :-1].cuda()).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().cuda())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sharded(**settings) -> nn.Module:
    model = build(Case())
    for block in model.layers:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def test_one_gpu_trains_to_the_plain_models_bits():
    model = sharded()
    assert all(p.device.type == "cuda" for p in model.parameters())
    assert torch.equal(torch.stack(train(model)), torch.stack(train(build(Case()).cuda())))


@pytest.mark.parametrize("pin_memory", [True, False])
def test_offloading_trains_to_the_same_bits_with_shards_on_the_host(pin_memory):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory))
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(p.to_local().is_pinned() == pin_memory for p in model.parameters())
    offloaded = train(model)
    for ours, kept in zip(offloaded, train(sharded(mp_policy=policy)), strict=True):
        torch.testing.assert_close(ours, kept, rtol=1e-5, atol=1e-5)


def test_the_default_job_runs_on_the_gpu(tmp_path):
    program = Path(__file__).parents[1] / "train.py"
    flags = ["--steps", "3", "--batch-size", "8", "--out", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, program, *flags, "--device", "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_offloaded_units_step_behind_backward_to_the_same_bits():
    def trained(in_backward: bool) -> list[torch.Tensor]:
        model = sharded(offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(BF16))

        def adamw(params):
            return torch.optim.AdamW(params, lr=1e-2, fused=True)

        optimizer = step_in_backward(model, adamw) if in_backward else adamw(model.parameters())
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, VOCAB, (2, 9), generator=generator).cuda()
            model(tokens[:, :-1]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().to_local().clone() for p in model.parameters()]

    pairs = zip(trained(True), trained(False), strict=True)
    assert all(a.device.type == "cpu" and torch.equal(a, b) for a, b in pairs)


def test_what_goes_up_and_down_is_page_locked():
    for rows, staging in ((torch.zeros(8), offload._up), (torch.zeros(8).cuda(), offload._down)):
        if rows.is_cuda:
            assert offload.Descent(rows).wait().is_pinned()
        else:
            offload.bring_up(rows, torch.empty(8, dtype=BF16, device="cuda"))
        assert all(buffer is None or buffer.is_pinned() for buffer in staging._buffers)


def test_a_trace_has_the_times_of_the_stream_that_computes():
    def step(model: nn.Module, busy: int) -> None:
        def slow(module: nn.Module, args: object) -> None:
            torch.cuda._sleep(busy)  # of the device, while the host goes on

        hook = model.layers[1].register_forward_pre_hook(slow)
        model(torch.zeros(2, 8, dtype=torch.int64, device="cuda")).float().sum().backward()
        hook.remove()

    model = sharded()
    step(model, 0)
    forwards = []
    for busy in (0, 200_000_000):  # clock cycles: about a tenth of a second
        with record() as trace:
            step(model, busy)
        mine = trace.ranks[0]
        assert mine.clock == "device" and mine.peak().gradients > 0
        forwards.append(
            {e.unit: e.seconds for e in trace.events if e.kind == "forward"}["layers.1"]
        )
    assert forwards[1] - forwards[0] > 0.05
