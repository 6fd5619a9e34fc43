"""Mean loss and perplexity: the same however examples are shared out, packed or padded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from llama import Llama, LlamaConfig
from llama.finetune.data import Example
from llama.finetune.evaluate import mean_loss, perplexity, summed_loss

CPU = torch.device("cpu")


def model() -> Llama:
    config = LlamaConfig(
        dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_hidden=24, vocab_size=40, max_seq_len=32
    )
    made = Llama(config)
    made.init_weights(torch.Generator().manual_seed(1))
    return made


def examples(count: int = 7, learnt: int = 1) -> list[Example]:
    """Of 3, 5, 7 ... tokens, all but the first two of which bear loss, or none."""
    ids = torch.randint(1, 40, (count, 20), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = range(3, 3 + 2 * count, 2)
    return [
        Example(row[:length], [0, 0] + [learnt] * (length - 2))
        for row, length in zip(ids, lengths, strict=True)
    ]


def expected(net: Llama, data: Sequence[Example]) -> float:
    """The mean by torch's cross-entropy, an example at a time."""
    losses = []
    for ids, loss_mask in data:
        logits = net(torch.tensor([ids[:-1]]))[0].double()
        of_all = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        losses.append(of_all[torch.tensor(loss_mask[1:], dtype=torch.bool)])
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("pack_to", [None, 16, 24])
def test_mean_loss_is_the_mean_over_target_tokens(batch, pack_to):
    net, data = model(), examples()
    loss = mean_loss(net, data, batch, 0, CPU, pack_to=pack_to)
    assert loss == pytest.approx(expected(net, data), abs=1e-6)


def _mean_loss(learnt: int, pack_to: int | None) -> float | str:
    try:
        return mean_loss(model(), examples(learnt=learnt), 2, 0, CPU, pack_to)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("pack_to", [None, 16])
def test_ranks_agree_on_the_mean_over_all_of_them(run_ranks, pack_to):
    one, two = run_ranks(2, _mean_loss, 1, pack_to)
    assert one == two == pytest.approx(expected(model(), examples()), abs=1e-6)


def _of_one_example() -> float:
    return mean_loss(model(), examples(1), 2, 0, CPU)


def test_a_rank_without_examples_takes_part(run_ranks):
    one, two = run_ranks(2, _of_one_example)
    assert one == two == pytest.approx(expected(model(), examples(1)), abs=1e-6)


def test_examples_without_a_target_are_an_error_on_every_rank_not_0_by_0(run_ranks):
    message = "none of the 7 examples to evaluate on has a token that bears loss"
    for answer in (_mean_loss(0, None), *run_ranks(2, _mean_loss, 0, None)):
        assert message in answer


def test_summed_loss_of_packed_rows_is_that_of_their_documents():
    net = model().double()
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).masked_fill(tokens < 9, -100)
    packed = summed_loss(net, tokens, targets, [[5, 7]])
    alone = [summed_loss(net, tokens[:, s], targets[:, s]) for s in (slice(5), slice(5, 12))]
    assert packed.shape == ()
    torch.testing.assert_close(packed, sum(alone), rtol=0, atol=1e-10)


def test_perplexity_is_the_exponential_and_infinite_beyond_a_float():
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(32000)) == pytest.approx(32000)
    assert perplexity(710.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
