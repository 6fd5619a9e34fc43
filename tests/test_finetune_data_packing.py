"""Claims about packed rows, weights, and the ends of epochs."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.finetune.data import Batches, Corpus, Example, Part, StepSize, eval_batches, load
from llama.finetune.data.packing import OPEN_ROWS, pack
from llama.finetune.tasks import TOKENIZER_PATH
from llama.tokenizer import Tokenizer

PAD = 0
ROOM = 24
lengths = st.lists(st.integers(2, ROOM + 1), min_size=1, max_size=30)
world_sizes = st.sampled_from([1, 2, 3, 4])
pack_to = st.sampled_from([None, ROOM])


def numbered(lengths):
    """Examples whose ids are all different, a third of them not learnt, of given lengths."""
    ids, examples = itertools.count(1), []
    for length in lengths:
        taken = [next(ids) for _ in range(length)]
        examples.append(Example(taken, [0] + [i % 3 > 0 for i in taken[1:]]))
    return examples


def weighted(counts, weights):
    """A corpus of parts of so many examples each, whose first ids say which example each is."""
    total = sum(counts)
    whole = Corpus([Example([i + 1, 1], [0, 1]) for i in range(total)])
    parts, first = [], 0
    for count, weight in zip(counts, weights, strict=True):
        parts.append(Part("", first, count, weight))
        first += count
    return Corpus.joined(whole._pieces, parts, [])


def documents_of(batch):
    """The documents of a batch, as (tokens, targets) without their padding, in order."""
    found = []
    for row, tokens in enumerate(batch.tokens):
        spans = [tokens.numel()] if batch.documents is None else batch.documents[row]
        assert sum(spans) == tokens.numel()
        begin = 0
        for length in spans:
            ids = tokens[begin : begin + length]
            targets = batch.targets[row, begin : begin + length]
            kept = int((ids != PAD).sum())
            assert (ids[kept:] == PAD).all()
            assert (targets[kept:] == -100).all()
            if kept:
                found.append((ids[:kept].tolist(), targets[:kept].tolist()))
            begin += length
    return found


def expected(example):
    """Tokens and targets of an example."""
    ids, mask = example
    return ids[:-1], [i if learnt else -100 for i, learnt in zip(ids[1:], mask[1:], strict=True)]


# ---- Rows -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=300), st.integers(50, 60))
def test_packing_loses_and_repeats_nothing_and_no_row_is_too_long(positions, room):
    names = np.arange(len(positions)) + 7
    rows = pack(names, np.array(positions, int), room)
    members = [rows[row].tolist() for row in range(len(rows))]
    assert sorted(itertools.chain(*members)) == names.tolist()
    assert all(members)
    assert all(row == sorted(row) for row in members)
    assert [row[0] for row in members] == sorted(row[0] for row in members)
    filled = [sum(positions[name - 7] for name in row) for row in members]
    assert max(filled, default=0) <= room
    # Best-fit leaves at most one row at most half full, of those that are open together.
    if len(rows) <= OPEN_ROWS:
        assert sum(2 * row <= room for row in filled) <= 1


def test_a_document_goes_where_it_leaves_least_room_and_to_the_oldest_of_several():
    rows = pack(np.arange(7), np.array([6, 5, 7, 5, 3, 4, 9]), 10)
    assert [rows[row].tolist() for row in range(len(rows))] == [[0, 5], [1, 3], [2, 4], [6]]


def test_beyond_64_open_rows_the_oldest_is_closed():
    positions = np.array([6] * (OPEN_ROWS + 1) + [4, 4])
    rows = pack(np.arange(len(positions)), positions, 10)
    assert rows[0].tolist() == [0]
    assert rows[1].tolist() == [1, OPEN_ROWS + 1]
    assert rows[2].tolist() == [2, OPEN_ROWS + 2]


def test_a_packed_row_is_documents_one_behind_another_and_its_rest_one_of_padding():
    examples = [Example([1, 7, 8, 2], [0, 0, 1, 1]), Example([1, 5, 2], [0, 1, 1])]
    batch = Batches(examples, 2, 0, PAD, pack_to=12).batch(0)
    (row, blank) = batch.documents
    assert row in ([3, 2, 3], [2, 3, 3])
    assert blank == [8]
    assert documents_of(batch) == [
        expected(examples[i]) for i in ((0, 1) if row[0] == 3 else (1, 0))
    ]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


@settings(deadline=None)
@given(lengths, st.integers(1, 4), world_sizes, st.integers(0, 9), pack_to)
def test_ranks_share_out_the_same_rows_whatever_their_number(lengths, rows, size, step, room):
    examples, global_batch = numbered(lengths), rows * size
    whole = Batches(examples, global_batch, 5, PAD, pack_to=room).batch(step)
    for rank in range(size):
        share = Batches(examples, global_batch, 5, PAD, rank, size, room).batch(step)
        assert share.tokens.equal(whole.tokens[rank::size])
        assert share.targets.equal(whole.targets[rank::size])
        assert (share.documents is None) == (whole.documents is None) == (room is None)
        if room:
            assert share.documents == whole.documents[rank::size]


@settings(deadline=None)
@given(lengths, st.integers(1, 8), st.integers(1, 3), pack_to)
def test_each_epoch_holds_every_document_once_and_ends_with_blank_rows(lengths, rows, epochs, room):
    examples = numbered(lengths)
    batches = Batches(examples, rows, 3, PAD, pack_to=room)
    for epoch in range(epochs):
        first, end = batches.steps(epoch) if epoch else 0, batches.steps(epoch + 1)
        assert end - first == math.ceil(batches.rows_in_epoch(epoch) / rows)
        taken = [batches.batch(step) for step in range(first, end)]
        assert all(len(batch.tokens) == rows for batch in taken)
        seen = [document for batch in taken for document in documents_of(batch)]
        assert sorted(seen) == sorted(expected(example) for example in examples)
        one_by_one = [documents_of(row) for batch in taken for row in batch.split(1)]
        assert all(one_by_one[: batches.rows_in_epoch(epoch)])
        assert not any(one_by_one[batches.rows_in_epoch(epoch) :])


@settings(deadline=None)
@given(lengths, st.integers(1, 8), st.floats(0.1, 3), st.floats(0.1, 3), pack_to)
def test_a_run_that_goes_on_for_more_epochs_leaves_out_nothing(lengths, rows, few, more, room):
    examples = numbered(lengths)
    few, more = sorted((few, more))
    first, second = (Batches(examples, rows, 3, PAD, pack_to=room) for _ in range(2))
    at_once = [first.batch(step).tokens.tolist() for step in range(first.steps(more))]
    stopped, whole = second.steps(few), math.ceil(more)
    in_two = [second.batch(step).tokens.tolist() for step in range(stopped)]
    in_two += [second.batch(step).tokens.tolist() for step in range(stopped, second.steps(more))]
    assert in_two == at_once
    seen = [d for step in range(first.steps(whole)) for d in documents_of(first.batch(step))]
    assert sorted(seen) == sorted(whole * [expected(example) for example in examples])


def test_an_epoch_shorter_than_the_global_batch_is_a_step_and_ranks_beyond_it_have_blank_rows():
    shares = [Batches(numbered([4, 6]), 8, 0, PAD, rank, 4) for rank in range(4)]
    assert shares[0].steps(3) == 3
    for step in range(3):
        batches = [share.batch(step) for share in shares]
        assert [batch.tokens.shape for batch in batches] == [(2, 5)] * 4
        assert [bool((batch.targets != -100).any()) for batch in batches] == [
            *(True, True, False, False)
        ]


def test_an_epoch_without_examples_takes_no_step():
    batches = Batches(weighted([1, 1], [0.5, 0.5]), 4, 0, PAD)
    assert [batches.rows_in_epoch(epoch) for epoch in range(4)] == [0, 2, 0, 2]
    assert [batches.steps(epochs) for epochs in (2, 2.5, 3, 4)] == [1, 1, 1, 2]
    assert sorted(i for step in range(2) for i in batches.batch(step).tokens[:, 0].tolist()) == [
        *(0, 0, 0, 0, 1, 1, 2, 2)
    ]


def test_a_packed_batch_depends_on_its_step_alone():
    examples = numbered([3, 9, 20, 4, 4, 17, 8] * 5)
    one, other = (Batches(examples, 4, 3, PAD, pack_to=ROOM) for _ in range(2))
    forwards = [one.batch(step).tokens.tolist() for step in range(30)]
    backwards = [other.batch(step).tokens.tolist() for step in reversed(range(30))]
    assert forwards == backwards[::-1]


@settings(deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 5), pack_to)
def test_the_size_of_a_step_is_that_of_its_batch(lengths, rows, step, room):
    batches = Batches(numbered(lengths), rows, 3, PAD, pack_to=room)
    batch = batches.batch(step)
    documents = documents_of(batch)
    assert batches.size(step) == StepSize(
        targets=int((batch.targets != -100).sum()),
        tokens=sum(len(tokens) for tokens, _ in documents),
        squares=sum(len(tokens) ** 2 for tokens, _ in documents),
    )


@settings(deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 5))
def test_a_packed_batch_is_as_wide_as_its_longest_row_rounded_up_to_8(lengths, rows, step):
    room = ROOM - 2
    lengths = [min(length, room + 1) for length in lengths]
    batch = Batches(numbered(lengths), rows, 0, PAD, pack_to=room).batch(step)
    longest = int((batch.tokens != PAD).sum(1).max())
    assert batch.tokens.shape == (rows, min(-(-longest // 8) * 8, room))


def test_an_example_longer_than_a_packed_row_is_refused():
    with pytest.raises(ValueError, match="example 2 has 9 positions, more than the 8 of a packed"):
        Batches(numbered([4, 10]), 2, 0, PAD, pack_to=8)
    with pytest.raises(ValueError, match="example 1 has 9 positions"):
        eval_batches(numbered([10]), 2, PAD, pack_to=8)


def test_a_batch_splits_into_parts_that_keep_their_documents():
    batch = Batches(numbered([4, 9, 12, 20, 6, 7]), 5, 0, PAD, pack_to=ROOM).batch(0)
    parts = batch.split(2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert torch.cat([part.tokens for part in parts]).equal(batch.tokens)
    assert torch.cat([part.targets for part in parts]).equal(batch.targets)
    assert list(itertools.chain(*(part.documents for part in parts))) == batch.documents
    with pytest.raises(ValueError, match="0 rows"):
        batch.split(0)


@settings(deadline=None)
@given(st.lists(st.integers(2, 9), max_size=30), st.integers(1, 5), world_sizes, pack_to)
def test_evaluation_takes_each_example_once_packed_or_padded(lengths, rows, size, room):
    examples = numbered(lengths)
    ranks = [list(eval_batches(examples, rows, PAD, rank, size, room)) for rank in range(size)]
    shapes = [[batch.tokens.shape for batch in batches] for batches in ranks]
    assert all(other == shapes[0] for other in shapes)
    assert bool(shapes[0]) == bool(examples)
    assert all(shape[0] <= rows for shape in shapes[0])
    seen = [d for batches in ranks for batch in batches for d in documents_of(batch)]
    assert sorted(seen) == [expected(example) for example in examples]


# ---- Epochs and weights ---------------------------------------------------------------------

counts = st.lists(st.integers(1, 12), min_size=1, max_size=4)
weights = st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1, 1.5, 2, 3.7])


def stream(corpus, epochs, room=None):
    """The examples of each epoch, by number."""
    batches = Batches(corpus, 1, 9, PAD, pack_to=room)
    starts = itertools.accumulate((batches.rows_in_epoch(e) for e in range(epochs)), initial=0)
    return [
        [ids[0] - 1 for row in range(*span) for ids, _ in documents_of(batches.batch(row))]
        for span in itertools.pairwise(starts)
    ]


@settings(deadline=None, max_examples=60)
@given(st.data(), counts, pack_to)
def test_a_weight_is_how_often_each_example_is_seen_an_epoch(data, counts, room):
    chosen = [data.draw(weights) for _ in counts]
    chosen[0] = max(chosen[0], 1.0 if sum(chosen) * min(counts) < 1.1 else 0.1)
    corpus, epochs = weighted(counts, chosen), 12
    taken = stream(corpus, epochs, room)
    for part in corpus.parts:
        members = range(part.first, part.first + part.count)
        share = part.count * Fraction(repr(part.weight))
        for epoch in range(epochs):
            seen = [i for i in taken[epoch] if i in members]
            assert len(seen) == math.floor((epoch + 1) * share) - math.floor(epoch * share)
            so_far = [i for examples in taken[: epoch + 1] for i in examples if i in members]
            often = [so_far.count(i) for i in members]
            assert max(often) - min(often) <= 1
            assert sum(often) == math.floor((epoch + 1) * share)


def test_weights_of_one_change_nothing_and_a_weight_of_two_is_each_example_twice():
    plain, ones = numbered([2] * 9), weighted([4, 5], [1.0, 1])
    batches = [Batches(corpus, 9, 4, PAD) for corpus in (plain, ones)]
    for step in range(3):
        order = [batch.batch(step).tokens[:, 0].tolist() for batch in batches]
        assert [(i + 1) // 2 for i in order[0]] == order[1]
    (epoch,) = stream(weighted([4, 5], [1.0, 2.0]), 1)
    assert sorted(epoch) == [0, 1, 2, 3, *sorted([4, 5, 6, 7, 8] * 2)]


def test_sources_are_shuffled_together_whatever_their_weights():
    (epoch,) = stream(weighted([50, 50], [1.0, 2.0]), 1)
    assert 10 < sum(i < 50 for i in epoch[:75]) < 40


def test_a_part_of_an_epoch_is_that_share_of_its_steps_rounded_up():
    batches = Batches(numbered([3] * 10), 4, 0, PAD)
    assert [batches.steps(epochs) for epochs in (0.1, 0.4, 1, 1.2, 1.4, 2, 3)] == [
        *(1, 2, 3, 4, 5, 6, 9)
    ]
    assert Batches(numbered([3] * 10), 1, 0, PAD).steps(0.1) == 1


def test_epochs_and_weights_that_hold_nothing_are_refused():
    for epochs in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="epochs are none: use a number above 0"):
            Batches(numbered([4]), 1, 0, PAD).steps(epochs)
    with pytest.raises(ValueError, match="less than one example: raise the weights"):
        Batches(weighted([3], [0.3]), 1, 0, PAD)
    with pytest.raises(ValueError, match="1 epochs hold no example"):
        Batches(weighted([1, 1], [0.5, 0.5]), 1, 0, PAD).steps(1)


# ---- From files to batches ------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.text("ab \u00e9", min_size=1).filter(str.strip), min_size=1, max_size=8),
    st.integers(2, 20),
    pack_to,
)
def test_every_token_of_every_text_is_learnt_once_an_epoch(tmp_path_factory, texts, seq_len, room):
    tokenizer = Tokenizer(TOKENIZER_PATH)
    path = tmp_path_factory.getbasetemp() / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    corpus = load([path], tokenizer, seq_len)
    batches = Batches(corpus, 3, 1, tokenizer.pad_id, pack_to=room)
    steps = range(batches.steps(1))
    learnt = torch.cat([batches.batch(step).targets.flatten() for step in steps])
    ids = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert sorted(learnt[learnt != -100].tolist()) == sorted(ids)
    assert sum(batches.size(step).targets for step in steps) == len(ids) == corpus.learnt.sum()


def test_a_corpus_reads_as_the_examples_it_was_made_of():
    examples = numbered([2, 5, 3])
    corpus = Corpus(examples)
    assert [(e.ids.tolist(), e.loss_mask.tolist()) for e in corpus] == [
        (ids, [int(learnt) for learnt in mask]) for ids, mask in examples
    ]
    assert corpus[-1].ids.tolist() == examples[-1].ids
    assert [e.ids.tolist() for e in corpus[1:]] == [ids for ids, _ in examples[1:]]
    assert corpus.lengths.tolist() == [2, 5, 3]
    assert corpus.learnt.tolist() == [sum(mask[1:]) for _, mask in examples]
    assert Corpus([Example([1, 2, 3], [1, 0, 1])]).learnt.tolist() == [1]  # never the first
    assert Corpus.of(corpus) is corpus
    with pytest.raises(IndexError, match="example 3 of 3"):
        corpus[3]
