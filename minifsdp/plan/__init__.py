"""Plan a run before it is paid for: memory, messages and time of one rank, on no GPU at all.

    from minifsdp.plan import plan

    def build():  # the model on meta, sharded; and what makes its optimizer
        with torch.device("meta"):
            model = Model()
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model), lambda model: torch.optim.AdamW(model.parameters(), fused=True)

    def batch():  # what one micro-batch gives the model
        return (torch.zeros(1, 2048, dtype=torch.int64),)

    print(plan(build, batch, world_size=64, gpu="A100-80"))

`python -m minifsdp.plan --help` does the same for functions it is told by name.
"""

from .books import Rehearsal
from .machines import GPUS
from .rehearsal import rehearse
from .report import Report, plan
from .settings import Change, Settings
from .world import GPU

__all__ = ["GPU", "GPUS", "Change", "Rehearsal", "Report", "Settings", "plan", "rehearse"]
