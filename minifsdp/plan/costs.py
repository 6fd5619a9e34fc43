"""What each operator costs: floating-point operations, bytes read and written, messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Work(NamedTuple):
    """An operator on the device or the host."""

    operator: str
    flops: int
    dtype: torch.dtype | None  # of the products it adds up; None where it has none
    nbytes: int  # read and written
    on_host: bool
    unmasked_flops: int = 0  # the same, if no mask left anything out


class Transfer(NamedTuple):
    """A copy between host and device."""

    nbytes: int
    blocking: bool  # the host waits for it


class Message(NamedTuple):
    """A collective, launched."""

    kind: str  # all_gather, reduce_scatter, all_reduce, send, receive, other
    nbytes: int  # of all ranks' pieces together
    ranks: tuple[int, ...]


class Told(NamedTuple):
    """An event of the engine."""

    kind: str
    unit: str
    nbytes: int = 0  # of a message of units: of all ranks' pieces together


class Mark(NamedTuple):
    """Another phase or unit is at work from here."""

    phase: str
    unit: str


class Awaited(NamedTuple):
    """The device waits for the message launched last."""


class Sync(NamedTuple):
    """The host waits until the device has done all it was given."""


class Copied(NamedTuple):
    """Copies were issued that the host may wait for; or the host waits for some of before."""

    ago: int = 0
    """0: they are issued. Else: those are waited for that were the last, the last but one, ..."""


class Submitted(NamedTuple):
    """From here to its end, what is done on the host is done by a thread of its own."""

    ends: bool
    unit: str


Step = Work | Transfer | Message | Told | Mark | Awaited | Sync | Copied | Submitted

_VIEWS = frozenset(  # and what only allocates
    "view _unsafe_view reshape expand transpose t permute unsqueeze squeeze slice select split "  # noqa: SIM905
    "split_with_sizes unbind detach alias as_strided set_ unfold chunk narrow diagonal lift_fresh "
    "empty empty_like new_empty empty_strided new_empty_strided resize_ is_same_size".split()
)
_ONLY_WRITE = {"copy_", "_foreach_copy_", "fill_", "zero_"}
_ATTENTION = {
    "_scaled_dot_product_flash_attention": (1, False),
    "_scaled_dot_product_flash_attention_backward": (2.5, True),
    "_scaled_dot_product_efficient_attention": (1, False),
    "_scaled_dot_product_efficient_attention_backward": (2.5, True),
    "_scaled_dot_product_flash_attention_for_cpu": (1, False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (2.5, True),
}


def is_attention(work: Work) -> bool:
    return work.operator in _ATTENTION


_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
    # Functional ones, such as DTensor's when it redistributes
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def work_of(
    func: Any, args: Any, kwargs: dict[str, Any], result: Any, device_type: str
) -> Step | None:
    """What an operator costs; None for views and what only allocates."""
    packet = func.overloadpacket
    name = packet.__name__
    if name in _VIEWS:
        return None
    given = list(tensors(args))
    made = list(tensors(result))
    if not given and not made:
        return None
    types = {t.device.type for t in (*given, *made) if t.dim() or t.device.type == device_type}
    if len(types) > 1 and name in ("copy_", "_to_copy"):
        nbytes = made[0].numel() * min(t.itemsize for t in (*given, *made))
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        return Transfer(nbytes, blocking)
    nbytes = _traffic(func, args, kwargs, made)
    unmasked, masked = flops_of(func, args, kwargs, result)
    dtype = given[0].dtype if unmasked else None
    return Work(name, masked, dtype, nbytes, device_type not in types, unmasked)


def _traffic(func: Any, args: Any, kwargs: dict[str, Any], made: list[torch.Tensor]) -> int:
    """Bytes read and written: arguments, those that are changed once more, and new results."""
    nbytes = 0
    only_written = func.overloadpacket.__name__ in _ONLY_WRITE
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        touched = sum(map(_touched, tensors(value)))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        nbytes += touched * (2 if changed and not only_written else 1)
    if all(returned.alias_info is None for returned in func._schema.returns):
        nbytes += sum(map(_touched, made))
    return nbytes


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes: an expanded one is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            numel *= size
    return numel * tensor.itemsize


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Floating-point operations of an operator, without and with what a causal mask saves.

    Products of matrices as torch's FlopCounterMode counts them, and attention's two (five in
    backward). Kernels skip the half of attention that a causal mask leaves out.
    """
    packet = func.overloadpacket
    if packet.__name__ in _ATTENTION:
        times, is_backward = _ATTENTION[packet.__name__]
        query, key, value = args[1:4] if is_backward else args[:3]
        batch, heads, rows, dim = query.shape
        products = 2 * batch * heads * rows * key.shape[2] * (dim + value.shape[3])
        unmasked = int(times * products)
        return unmasked, unmasked // 2 if _is_causal(func, args, kwargs) else unmasked
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        return flops, flops
    return 0, 0


def _is_causal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            if position < len(args):
                return bool(args[position])
            return bool(kwargs.get("is_causal", argument.default_value))
    return False


def message_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Message | Awaited:
    """The collective that an operator launches, or waits for.

    Raises RuntimeError where the ranks that take part cannot be told.
    """
    name = func.overloadpacket.__name__
    if name == "wait_tensor":
        return Awaited()
    if func.namespace == "c10d":  # its tensors are among the arguments, inputs and outputs
        nbytes = max((t.nbytes for t in tensors(args)), default=0)
    else:
        nbytes = max(sum(t.nbytes for t in tensors(given)) for given in (args, result))
    for value in (*args, *kwargs.values()):
        group = _group(value)
        if group is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            return Message(_COLLECTIVES.get(name, "other"), nbytes, ranks)
    raise RuntimeError(
        f"a plan cannot tell which ranks {func} is for, so neither how long it takes: of its "
        "arguments none is a process group or the name of one"
    )


def _group(value: Any) -> dist.ProcessGroup | None:
    """The process group that an operator's argument is, boxed or by its name."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str):
        return _group_named(value)
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError, ValueError):
            return None  # a reduction's operator is one too
    return None


def _group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of a name; functional collectives know theirs so.

    torch's registry of names is private; nothing public resolves them.
    """
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return None  # such as the name of a reduction
