"""Fully Sharded Data Parallel, from scratch in pure PyTorch.

Parameters, gradients and optimizer state are sharded over ranks by rows, and gathered only while
they are computed with. `from minifsdp import fully_shard` stands in for
`from torch.distributed.fsdp import fully_shard`.
"""

from .api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from .clip import clip_grad_norm_
from .module import FSDPModule, UnshardHandle
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .state import full_state_dict, load_full_state_dict
from .stepping import step_in_backward

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "step_in_backward",
]
