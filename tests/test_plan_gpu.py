"""On a GPU: the plan's peak against what CUDA's allocator counts, on one rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_COMPARE = """
import json, os, sys
import torch
import torch.distributed as dist
from benchmarks.plan_models import Options, llama, tokens_and_targets
from llama import LlamaConfig
from minifsdp.plan import GPU, Settings, rehearse
from minifsdp.plan.rehearsal import counting, train_step

options, settings = Options(**json.loads(sys.argv[1])), Settings()
config = LlamaConfig(dim=2048, n_layers=8, n_heads=16, n_kv_heads=4, ffn_hidden=5632,
                     vocab_size=32000, norm_eps=1e-5, rope_theta=1e4, max_seq_len=2048)
planned = rehearse(lambda: llama(config, GPU, options), lambda: tokens_and_targets(2, 2048, GPU),
                   1, GPU, settings)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29533")
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1)
model, make_optimizer = llama(config, "cuda", options)
model.to_empty(device="cpu" if options.cpu_offload else "cuda")
for parameter in model.parameters():
    with torch.no_grad():
        parameter.to_local().fill_(0.01)
optimizer = make_optimizer(model)
batch = lambda: tokens_and_targets(2, 2048, "cuda")
train_step(model, optimizer, batch, settings)
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
with counting() as messages:
    train_step(model, optimizer, batch, settings)
print(json.dumps([planned.peak(False).nbytes, torch.cuda.max_memory_allocated(),
                  planned.messages == messages]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"bf16": True, "activation_checkpointing": True},
        {"bf16": True, "activation_checkpointing": True, "cpu_offload": True},
    ],
)
def test_the_planned_peak_is_within_5_percent_of_the_allocators(options):
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE, json.dumps(options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    planned, measured, same_messages = json.loads(done.stdout.splitlines()[-1])
    assert planned == pytest.approx(measured, rel=0.05)
    assert same_messages
