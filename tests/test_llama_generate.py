"""Generation: against independent figures, in batches, sampled, and on ranks that differ."""

import functools

import pytest
import torch
import torch.distributed as dist
from golden_llama import CASES, golden_model, golden_tokens
from test_llama_generate_text import restless_model as restless
from torch.distributed.fsdp import fully_shard as fsdp2

from llama import Llama, LlamaConfig
from llama.cache import KVCache
from llama.generate import generate
from minifsdp import fully_shard as minifsdp

CONFIG = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=48, vocab_size=64, max_seq_len=48
)
PROMPTS = [[1, 5, 9], [7], [1, 2, 3, 4, 5, 6, 7, 8], [60, 61]]


restless_model = functools.partial(restless, CONFIG)


class FixedLogits(torch.nn.Module):
    """Answers the same logits whatever came before."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.config = LlamaConfig(
            dim=2, n_layers=1, n_heads=1, n_kv_heads=1, ffn_hidden=2, vocab_size=len(logits)
        )
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, tokens, cache=None):
        return self.logits.expand(*tokens.shape, -1)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_golden_ones(case):
    expected = CASES[case]["greedy_16_after_row0_first8"]
    model = golden_model(case)
    prompt = golden_tokens(model.config.vocab_size)[0, :8].tolist()
    assert prompt + generate(model, prompt, 16) == expected


def test_the_cache_changes_no_token():
    model = restless_model()
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
        assert len(set(tokens)) > 5
        assert generate(model, prompt, 20) == tokens[len(prompt) :]


def test_a_padded_batch_gives_what_its_prompts_give_one_by_one():
    model = restless_model()
    alone = [generate(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 20) == alone
    eos = alone[0][6]
    stopped = [ids[: ids.index(eos)] if eos in ids else ids for ids in alone]
    assert len({len(ids) for ids in stopped}) > 1
    assert generate(model, PROMPTS, 20, eos_id=eos) == stopped
    assert [generate(model, prompt, 20, eos_id=eos) for prompt in PROMPTS] == stopped


def test_padded_logits_are_those_of_the_row_alone():
    model = restless_model().double()
    prompt = torch.tensor([PROMPTS[0]])
    padded = torch.nn.functional.pad(prompt, (5, 0))
    cache = KVCache(CONFIG.n_layers, 10, padding=torch.tensor([5]))
    logits = model(padded, cache=cache)
    # So close only if positions leave the padding out too: float32 tables differ by 1e-7.
    torch.testing.assert_close(logits[:, 5:], model(prompt), rtol=0, atol=1e-12)


def test_padding_attends_to_itself_so_that_no_row_of_the_mask_is_empty():
    mask = KVCache(1, 4, padding=torch.tensor([2, 0])).mask(4, torch.device("cpu"))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[1, 0], torch.ones(4, 4).tril().bool())


def test_a_prompt_fed_in_pieces_gives_the_logits_of_the_whole():
    model = restless_model().double()
    tokens = torch.tensor([PROMPTS[2]])
    cache = KVCache(CONFIG.n_layers, 8)
    pieces = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 3), (3, 7), (7, 8))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens))
    with pytest.raises(ValueError, match="capacity of 8"):
        model(tokens[:, :1], cache=cache)


def test_sampling_repeats_with_its_seed_and_differs_with_another():
    model = restless_model()

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, PROMPTS, 20, temperature=1.0, generator=generator)

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_sampled_frequencies_follow_temperature_and_top_p():
    # Probabilities 0.5, 0.3, 0.15, 0.05: the first two hold 0.7 of the mass and the third no more.
    model = FixedLogits(torch.tensor([0.3, 0.05, 0.5, 0.15]).log().tolist())

    def frequencies(**settings):
        generator = torch.Generator().manual_seed(0)
        ids = generate(model, [0], 3000, generator=generator, **settings)
        return torch.bincount(torch.tensor(ids), minlength=4) / 3000

    near = dict(atol=0.03, rtol=0)
    torch.testing.assert_close(
        frequencies(temperature=1.0), torch.tensor([0.3, 0.05, 0.5, 0.15]), **near
    )
    torch.testing.assert_close(
        frequencies(temperature=1.0, top_p=0.7), torch.tensor([0.375, 0, 0.625, 0]), **near
    )
    squared = torch.tensor([0.3, 0.05, 0.5, 0.15]) ** 2
    torch.testing.assert_close(frequencies(temperature=0.5), squared / squared.sum(), **near)
    assert frequencies(temperature=5.0, top_p=0.01)[2] == 1


def test_generation_leaves_no_graph_and_fills_the_sequence_to_its_last_token():
    model = restless_model()
    assert len(generate(model, PROMPTS[0], CONFIG.max_seq_len - 3)) == CONFIG.max_seq_len - 3
    assert generate(model, PROMPTS[0], 0) == []
    assert generate(model, [], 5) == []
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 46), r"prompt 0 has 3 tokens; with max_new_tokens 46 .* max_seq_len 48"),
        (([[1], []], 4), "prompt 1 is empty"),
        (([1, 64], 4), "outside the model's vocabulary of 64"),
        (([1, -1], 4), "outside the model's vocabulary"),
        (("hello", 4), "generate takes token ids, not text: encode it"),
        ((["hello", "you"], 4), "generate takes token ids, not text: encode it"),
        (([1], -1), "max_new_tokens must not be negative"),
        (([1], 4, -0.5), "temperature must be 0 or more"),
        (([1], 4, 1.0, 0.0), "top_p must be above 0"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(restless_model(), *arguments)


def sharded(shard) -> Llama:
    model = restless_model()
    for block in model.layers:
        shard(block)
    return shard(model)


def generate_unequally(engine: str) -> None:
    """Each rank brings other prompts in each of four rounds: several, none, one."""
    rank = dist.get_rank()
    plain, model = restless_model(), sharded({"fsdp2": fsdp2, "minifsdp": minifsdp}[engine])
    for turn in range(4):
        own = [PROMPTS[:3], [], PROMPTS[3:], PROMPTS][(rank + turn) % 4]
        new = 6 + 3 * (rank + turn) % 7
        expected = [generate(plain, prompt, new, eos_id=26) for prompt in own]
        assert generate(model, own, new, eos_id=26) == expected
    assert generate(model, [], 5) == []
    with pytest.raises(ValueError, match="another rank" if rank else "outside the model's"):
        generate(model, [1] if rank else [99], 4)
    # One rank's own end to its row does not end the others'.
    new_ids = generate(model, PROMPTS[0], 9, on_token=lambda row, token: not rank)
    assert new_ids == generate(plain, PROMPTS[0], 9)[: None if rank else 1]


@pytest.mark.parametrize(("engine", "world_size"), [("fsdp2", 2), ("minifsdp", 2), ("minifsdp", 3)])
def test_sharded_ranks_with_unequal_prompts_finish_together(run_ranks, engine, world_size):
    run_ranks(world_size, generate_unequally, engine)


def test_each_token_is_told_as_it_is_chosen_and_a_true_answer_ends_the_row():
    model = restless_model()
    told: list[tuple[int, int]] = []
    new_ids = generate(model, PROMPTS, 9, on_token=lambda *token: told.append(token))
    assert [[token for row, token in told if row == number] for number in range(4)] == new_ids
    assert [row for row, _ in told[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    eos = new_ids[0][3]
    told.clear()
    ended = generate(model, PROMPTS[0], 9, eos_id=eos, on_token=lambda *token: told.append(token))
    assert [token for _, token in told] == ended
    assert eos not in ended
    cut = generate(model, PROMPTS, 9, on_token=lambda row, token: token == new_ids[2][4])
    assert cut[2] == new_ids[2][:5]
    assert all(cut[row] == new_ids[row] for row in range(4) if new_ids[2][4] not in new_ids[row])


def test_a_cache_to_go_on_with_saves_forwards_and_changes_no_token():
    model = restless_model().double()
    cache = KVCache(CONFIG.n_layers, CONFIG.max_seq_len)
    prompt, added, fed = list(PROMPTS[2]), [], []
    model.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    for more in ([9, 8], [4], []):
        first = len(fed)
        new = generate(model, prompt, 7, cache=cache)
        assert fed[first] == (8 if first == 0 else 1 + len(added))
        assert new == generate(model, prompt, 7)
        assert cache.length == len(prompt) + len(new) - 1
        added = more
        prompt = [*prompt, *new, *added]


@pytest.mark.parametrize(
    ("prompts", "held", "message"),
    [
        ([[1], [2]], 0, "is for one prompt, without padding, not for 2"),
        ([1, 2], 2, "holds 2 tokens, but must hold fewer"),
        ([1, 2, 3, 4, 5], 0, "5 new tokens exceed the cache's 9"),
    ],
)
def test_a_cache_that_does_not_fit_the_prompt_is_refused(prompts, held, message):
    model, cache = restless_model(), KVCache(CONFIG.n_layers, 9)
    if held:
        model(torch.ones(1, held, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, 5, cache=cache)
