"""Is a sharding engine right? Train with it and with others side by side and compare every bit.

    # mine.py
    import torch
    from torch import nn

    def build():
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def batch(rank, step):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))

    def loss(output, batch):
        return output.square().mean()

    python -m minifsdp.verify --model mine:build --batch mine:batch --loss mine:loss
    python -m minifsdp.verify --engine mine:shard ...    # an engine of your own: see `engines`

In a test, inside a process group or without one (then ranks are launched):

    from minifsdp.verify import compare

    compare(build, batch, engines=(my_shard, "fsdp2"), loss=loss).raise_if_different()

[Note: conventions]
`build()` gives the model, the same bits at each call: torch.manual_seed is called before it.
`batch(rank, step)`, with accumulation `batch(rank, step, micro)`, gives what the model is called
with (a tuple: arguments; a dict: keywords; else one argument) and depends on nothing else. Forward
draws from torch's default generator alone, seeded before each call: two are compared first. The
loss is what the model returns if that is one number, else `loss(output, batch)`. Units are the
children of the ModuleList or Sequential with most parameters, and the root (see `units`). What is
compared, in which order: `observation`. Which engines have to have equal bits: FSDP2 and minifsdp;
of FSDP1, DDP and `none`, which sum in another order, what rounding explains is allowed (`whole`,
`judging`).

Limits: every rank holds the model of each engine, with its optimizer, and copies of one phase of
two of them (a forward: all units' inputs, outputs and whole parameters). `none` runs every rank's
data on every rank; it, and a shaken twin of it, also run where FSDP1, DDP or `none` is compared.
"""

from .comparison import compare
from .engines import ENGINES, Engine
from .report import Comparison, Difference, Differs, PhaseResult, Report
from .settings import Settings

__all__ = ["ENGINES", "Comparison", "Difference", "Differs", "Engine", "PhaseResult", "Report"]
__all__ += ["Settings", "compare"]
