"""The head's own loss: what cross-entropy of all logits says, without ever holding them."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from peak import held_during
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from llama import Llama, LlamaConfig
from llama.head import Head

DIM, VOCAB = 6, 11
CHUNKS = [1, 3, 100]  # rows: one at a time, several chunks of uneven size, all in one


def head(dtype: torch.dtype, rows_at_once: int, dim: int = DIM, vocab: int = VOCAB) -> Head:
    made = Head(dim, vocab)
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(1))
    made.chunk_bytes = rows_at_once * vocab * (8 if dtype == torch.float64 else 4)
    return made.to(dtype)


def batch(dtype: torch.dtype, share: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    """x (2, 7, DIM) and targets (2, 7), of which about `share` are real."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, DIM, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (2, 7), generator=generator)
    none = torch.rand(2, 7, generator=generator) >= share
    return x.requires_grad_(), targets.masked_fill(none, -100)


def whole(head: Head, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same losses from all logits at once, by torch."""
    logits = F.linear(x, head.weight)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def both(
    head: Head, x: torch.Tensor, targets: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Losses, gradient of x and gradient of the weight: the head's, then torch's."""
    found = []
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2))
    for losses in (head(x, targets), whole(head, x, targets)):
        x.grad = head.weight.grad = None
        (losses * weights).sum().backward()
        found.append((losses.detach(), x.grad, head.weight.grad))
    return found


@pytest.mark.parametrize("rows_at_once", CHUNKS)
@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_losses_and_gradients_are_those_of_cross_entropy(rows_at_once, share, dtype, atol):
    ours, theirs = both(head(dtype, rows_at_once), *batch(dtype, share))
    assert ours[0].dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert ours[0].count_nonzero() == (batch(dtype, share)[1] != -100).sum()


@pytest.mark.parametrize("rows_at_once", CHUNKS)
def test_bfloat16_logits_give_float32_losses_and_bfloat16_gradients(rows_at_once):
    ours, theirs = both(head(torch.bfloat16, rows_at_once), *batch(torch.bfloat16))
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=2**-6, atol=2**-7)


def test_the_gradient_of_a_bfloat16_weight_is_summed_over_chunks_in_float32():
    """1024 equal terms: from 256 on, a sum in bfloat16 would not grow any more."""
    net = head(torch.bfloat16, rows_at_once=1)
    x, targets = torch.ones(1, 1024, DIM, dtype=torch.bfloat16), torch.ones(1, 1024).long()
    net(x, targets).sum().backward()
    many, net.weight.grad = net.weight.grad, None
    net(x[:, :1], targets[:, :1]).sum().backward()
    torch.testing.assert_close(many, net.weight.grad * 1024)


@pytest.mark.parametrize("rows_at_once", CHUNKS)
def test_gradcheck(rows_at_once):
    net = head(torch.float64, rows_at_once)
    x, targets = batch(torch.float64)

    def losses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, {"weight": weight}, (x, targets))

    assert torch.autograd.gradcheck(losses, (x, net.weight))


@pytest.mark.parametrize("rows_at_once", CHUNKS)
def test_backward_twice_gives_twice_the_gradient(rows_at_once):
    net = head(torch.float64, rows_at_once)
    loss = net(*batch(torch.float64)).sum()
    loss.backward(retain_graph=True)
    once = net.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.weight.grad, 2 * once)


def test_without_any_target_losses_and_gradients_are_zero_whatever_x_holds():
    net = head(torch.float32, 3)
    x = torch.full((2, 4, DIM), torch.nan, requires_grad=True)
    losses = net(x, torch.full((2, 4), -100))
    losses.sum().backward()
    assert losses.shape == (2, 4)
    for tensor in (losses, x.grad, net.weight.grad):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_a_batch_of_no_rows_has_no_losses_and_a_gradient_of_zeros():
    net = head(torch.float32, 3)
    losses = net(torch.empty(0, 4, DIM), torch.empty(0, 4, dtype=torch.int64))
    losses.sum().backward()
    assert losses.shape == (0, 4)
    assert not net.weight.grad.any()


@pytest.mark.parametrize("pretended", ["meta", "fake"])
def test_without_values_every_token_counts_as_having_a_target(pretended):
    fake = FakeTensorMode(allow_non_fake_inputs=True) if pretended == "fake" else nullcontext()
    targets = torch.ones(2, 4, dtype=torch.int64)
    with fake, torch.device("meta" if pretended == "meta" else "cpu"):
        net, x = Head(DIM, VOCAB), torch.empty(2, 4, DIM, requires_grad=True)
        losses = net(x, targets.to(x.device))
        losses.sum().backward()
    assert losses.shape == (2, 4) and x.grad.shape == x.shape
    assert net.weight.grad.shape == net.weight.shape


def test_a_target_outside_the_vocabulary_is_refused():
    x, targets = batch(torch.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        head(torch.float32, 3)(x, targets.fill_(VOCAB))


def test_under_autocast_losses_and_gradients_are_those_of_cross_entropy_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(head(torch.float32, 3), *batch(torch.float32))
    assert [t.dtype for t in ours] == [torch.float32] * 3
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=2**-6, atol=2**-7)
    assert torch.equal(ours[1], ours[1].bfloat16().float())


# ---- What is not done -----------------------------------------------------------------------


def products(head: Head, x: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Products of a row with the weight, as the forward and the backward do them, in rows."""
    one_row = 2 * x.shape[-1] * head.out_features

    def addmm_flops(total: torch.Size, a: torch.Size, b: torch.Size, **_: object) -> int:
        return 2 * a[0] * a[1] * b[1]

    in_place = {torch.ops.aten.addmm_: addmm_flops}  # which torch's table lacks
    with FlopCounterMode(display=False, custom_mapping=in_place) as forward:
        loss = head(x, targets).sum()
    with FlopCounterMode(display=False, custom_mapping=in_place) as backward:
        loss.backward()
    return forward.get_total_flops() / one_row, backward.get_total_flops() / one_row


def test_only_tokens_with_a_target_cost_anything():
    x, targets = batch(torch.float32, share=0.3)
    rows = int((targets != -100).sum())
    assert 1 < rows < targets.numel()
    assert products(head(torch.float32, 2), x, targets) == (rows, 3 * rows)


def test_logits_of_a_single_chunk_are_not_computed_again():
    x, targets = batch(torch.float32, share=1)
    assert products(head(torch.float32, 14), x, targets) == (14, 2 * 14)
    assert products(head(torch.float32, 13), x, targets) == (14, 3 * 14)


def test_a_frozen_head_computes_no_gradient_for_its_weight():
    x, targets = batch(torch.float32, share=1)
    net = head(torch.float32, 2).requires_grad_(False)
    assert products(net, x, targets) == (14, 2 * 14)
    assert net.weight.grad is None and x.grad.any()
    net.requires_grad_(True)
    assert products(net, x.detach(), targets) == (14, 2 * 14)
    assert net.weight.grad.any()


@pytest.mark.parametrize(
    ("dtype", "held_logits"), [(torch.float32, 2), (torch.bfloat16, 2.5), (torch.float64, 2)]
)
def test_the_most_held_at_once_is_a_chunks_logits_twice(dtype, held_logits):
    """Besides what is kept: the gradients, and what the head saves of its input."""
    rows, dim, vocab, chunk = 1024, 2, 4096, 64
    net, wide = head(dtype, chunk, dim, vocab), torch.promote_types(dtype, torch.float32)
    x = torch.randn(1, rows, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (1, rows))

    def step() -> None:
        net.weight.grad = x.grad = None
        net(x, targets).sum().backward()

    step()
    of_x, of_weight = (t.numel() * (wide.itemsize + dtype.itemsize) for t in (x, net.weight))
    formula = held_logits * chunk * vocab * wide.itemsize
    peak = held_during(step).peak
    assert 0.9 * formula <= peak <= formula + 3 * (of_x + of_weight) + 2**16
    assert peak < rows * vocab * wide.itemsize / 4


# ---- In a model -----------------------------------------------------------------------------

CONFIG = LlamaConfig(
    dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden=24, vocab_size=40, max_seq_len=16
)


def model(**changes: object) -> Llama:
    made = Llama(LlamaConfig(**{**vars(CONFIG), **changes}))
    made.init_weights(torch.Generator().manual_seed(1))
    made.output.chunk_bytes = 5 * 40 * 4
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_given_targets_trains_as_one_whose_logits_are_compared_with_them(tied):
    net = model(tie_embeddings=tied).double()
    tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1).masked_fill(tokens < 9, -100)
    twin = copy.deepcopy(net)
    losses = net(tokens, targets=targets)
    logits = twin(tokens)
    assert losses.dtype == torch.float64 and losses.shape == (2, 8)
    losses.sum().backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"targets must be \(2, 8\) as tokens are, not \(2, 7\)"):
        model()(torch.zeros(2, 8, dtype=torch.int64), targets=torch.zeros(2, 7).long())


def test_the_head_has_one_parameter_and_nothing_else_in_its_state():
    assert list(model().output.state_dict()) == ["weight"]
    assert isinstance(model().output, nn.Linear)
