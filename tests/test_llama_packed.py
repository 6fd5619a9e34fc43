"""Packed rows: documents in one row are computed as if each were alone, and without a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peak import held_during
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from llama import Llama, LlamaConfig
from llama.attention import Attention, Documents, RotaryTables
from llama.cache import KVCache

SMALL = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=64, max_seq_len=64
)
LENGTHS = [[3, 3, 4, 10], [1, 19], [20]]


def small_model(**changes: object) -> Llama:
    model = Llama(LlamaConfig(**{**vars(SMALL), **changes}))
    model.init_weights(torch.Generator().manual_seed(1))
    for parameter in model.parameters():
        parameter.data *= 3  # so that attention is far from uniform
    return model


def batch(rows: int = 3, seq: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, (rows, seq); a third of the targets are none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (rows, seq), generator=generator)
    targets = torch.randint(64, (rows, seq), generator=generator)
    return tokens, targets.masked_fill(torch.rand(rows, seq, generator=generator) < 0.33, -100)


def losses_alone(
    model: Llama, tokens: torch.Tensor, targets: torch.Tensor, lengths: list[list[int]]
) -> torch.Tensor:
    """The loss of each token, each document given to the model on its own, by torch's loss."""
    losses = torch.zeros(tokens.shape, dtype=torch.float64)
    for row, of_row in enumerate(lengths):
        end = 0
        for length in of_row:
            begin, end = end, end + length
            logits = model(tokens[row : row + 1, begin:end])[0]
            of_document = F.cross_entropy(logits, targets[row, begin:end], reduction="none")
            losses[row, begin:end] = of_document
    return losses


@functools.cache
def double_model(n_kv_heads: int) -> Llama:
    return small_model(n_kv_heads=n_kv_heads).double()


@st.composite
def packings(draw: st.DrawFn) -> list[list[int]]:
    """Lengths of the documents of one to three rows, all of one sum."""
    seq = draw(st.integers(1, 40))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, seq - 1), max_size=8)) if seq > 1 else [])
        rows.append([b - a for a, b in zip([0, *cuts], [*cuts, seq], strict=True)])
    return rows


@settings(max_examples=60, deadline=None)
@given(lengths=packings(), n_kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_packed_documents_have_the_losses_and_gradients_they_have_alone(lengths, n_kv_heads, seed):
    model = double_model(n_kv_heads)
    tokens, targets = batch(len(lengths), sum(lengths[0]), seed)
    gradients = []
    together = model(tokens, targets=targets, documents=lengths)
    alone = losses_alone(model, tokens, targets, lengths)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    for losses in (together, alone):
        model.zero_grad()
        losses.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_logits_of_packed_documents_are_those_of_each_alone():
    model = double_model(2)
    tokens, _ = batch(1)
    logits = model(tokens, documents=[[7, 13]])
    torch.testing.assert_close(logits[:, :7], model(tokens[:, :7]), rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[:, 7:], model(tokens[:, 7:]), rtol=0, atol=1e-10)


def test_one_document_a_row_is_plain_causal_attention():
    model = double_model(2)
    tokens, _ = batch()
    assert torch.equal(model(tokens, documents=[[20]] * 3), model(tokens))


def test_given_positions_are_kept_in_packed_rows():
    model = double_model(2)
    tokens, _ = batch(1)
    positions = torch.arange(20) * 2
    logits = model(tokens, positions, documents=[[7, 13]])
    second = model(tokens[:, 7:], positions[7:])
    torch.testing.assert_close(logits[:, 7:], second, rtol=0, atol=1e-10)
    assert (logits - model(tokens, documents=[[7, 13]])).abs().max() > 1e-4


def test_a_packed_row_may_be_longer_than_the_model_allows_a_document_to_be():
    model = small_model(max_seq_len=8)
    tokens, targets = batch(2)
    model(tokens, targets=targets, documents=[[8, 8, 4], [4, 8, 8]])
    with pytest.raises(ValueError, match=r"9 tokens exceeds max_seq_len 8"):
        model(tokens, targets=targets, documents=[[8, 8, 4], [9, 8, 3]])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[20], [10, 9]], r"documents of row 1 have 19 tokens in all, but the row has 20"),
        ([[20], []], r"documents of row 1 have 0 tokens"),
        ([[20], [20, 0]], r"row 1 has a document of 0 tokens"),
        ([[25, -5], [20]], r"row 0 has a document of -5 tokens"),
        ([[20]], r"for each of 2 rows, not for 1"),
    ],
)
def test_lengths_that_do_not_fit_the_rows_are_refused_by_row(documents, message):
    with pytest.raises(ValueError, match=message):
        small_model()(batch(2)[0], documents=documents)


def test_documents_with_a_cache_are_refused():
    with pytest.raises(ValueError, match="documents and a cache"):
        small_model()(batch(2)[0], cache=KVCache(2, 20), documents=[[20], [20]])


# ---- Memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_mask_and_no_scores_of_a_whole_row_are_ever_held(dtype):
    seq, dim = 2048, 32
    config = LlamaConfig(**{**vars(SMALL), "dim": dim, "max_seq_len": seq})
    attention = Attention(config, RotaryTables(config.head_dim, 1e4, seq)).to(dtype)
    documents = Documents([[50] * 40 + [48]], 1, seq)
    x = torch.randn(1, seq, dim, dtype=dtype, requires_grad=True)
    positions = documents.positions(x.device)
    attention(x, positions, documents=documents)

    def step() -> None:
        attention(x, positions, documents=documents).sum().backward()

    held = held_during(step)
    assert held.largest <= 4 * seq * dim
    assert held.peak < seq * seq


# ---- Through checkpointing and compilers ----------------------------------------------------


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    tokens, targets = batch()
    model(tokens, targets=targets, documents=LENGTHS).sum().backward()
    return [p.grad for p in model.parameters()]


def inside(block: nn.Module) -> nn.Module:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return block


@pytest.mark.parametrize("wrap", [inside, checkpoint_wrapper])
def test_recomputed_blocks_see_the_same_documents(wrap: Callable[[nn.Module], nn.Module]):
    model = small_model()
    model.layers = nn.ModuleList(wrap(block) for block in model.layers)
    for a, b in zip(gradients_of(model), gradients_of(small_model()), strict=True):
        assert torch.equal(a, b)


def test_compiled_blocks_take_new_lengths_without_compiling_anew():
    model, expected = small_model(), small_model()
    torch._dynamo.reset()
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for block in model.layers:
        block.compile(backend=count)
    tokens, targets = batch()
    counts = []
    for lengths in (LENGTHS, [[20]] * 3, [[1] * 20, [2] * 10, [5] * 4]):
        losses = model(tokens, targets=targets, documents=lengths)
        counts.append(len(compiled))
        torch.testing.assert_close(losses, expected(tokens, targets=targets, documents=lengths))
    assert counts[0] > 0 and len(set(counts)) == 1
