"""Claims about reading JSONL files and about the batches made of their examples."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.finetune import data
from llama.finetune.data import Batches, Example, collate, eval_batches
from llama.finetune.tasks import TOKENIZER_PATH
from llama.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TOKENIZER_PATH)
PAD = 0
DIALOG = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
}
GOOD = json.dumps(DIALOG)


def write(folder, *lines):
    """A JSONL file of `lines`, each an object, a text or bytes."""
    path = folder / "data.jsonl"
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def load(path, seq_len=64):
    """The examples of a file as lists."""
    corpus = data.load([path], TOKENIZER, seq_len)
    return [Example(ids.tolist(), loss_mask.tolist()) for ids, loss_mask in corpus]


def numbered(lengths):
    """Examples whose ids are all different and whose tokens are all learnt, of given lengths."""
    ids, examples = iter(range(1, 10**6)), []
    for length in lengths:
        examples.append(Example([next(ids) for _ in range(length)], [0] + [1] * (length - 1)))
    return examples


def first_ids(batch):
    """The first token of each row: with `numbered`, which example it is."""
    return batch.tokens[:, 0].tolist()


# ---- Reading --------------------------------------------------------------------------------


def test_a_text_is_learnt_from_its_second_token_to_its_end(tmp_path):
    (example,) = load(write(tmp_path, {"text": "ab"}))
    assert example.ids == TOKENIZER.encode("ab", bos=True, eos=True)
    assert (example.ids[0], example.ids[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
    assert example.loss_mask == [0] + [1] * (len(example.ids) - 1)


def test_a_dialog_is_encoded_as_llama_2s_chat_and_only_its_answer_learnt(tmp_path):
    (example,) = load(write(tmp_path, DIALOG))
    assert example.ids == [1, *TOKENIZER.encode("[INST] Hi [/INST] Hello! "), 2]
    learnt = [i for i, mask in zip(*example, strict=True) if mask]
    assert TOKENIZER.decode(learnt).strip() == "Hello!"
    assert learnt[-1] == TOKENIZER.eos_id


def test_texts_and_dialogs_mix_and_blank_lines_a_bom_crlf_and_other_keys_do_no_harm(tmp_path):
    lines = [b"\xef\xbb\xbf" + GOOD.encode() + b"\r", "", "   ", {"text": "é", "source": "x"}]
    dialog, text = load(write(tmp_path, *lines))
    assert dialog == load(write(tmp_path, DIALOG))[0]
    assert TOKENIZER.decode(text.ids) == "é"


@settings(deadline=None)
@given(st.text("abc ", min_size=1).filter(str.strip), st.integers(2, 12))
def test_a_long_text_is_cut_with_every_token_learnt_just_once(tmp_path_factory, text, seq_len):
    path = write(tmp_path_factory.getbasetemp(), {"text": text})
    ids = TOKENIZER.encode(text, bos=True, eos=True)
    pieces = load(path, seq_len)
    assert ids == ids[:1] + [i for piece in pieces for i in piece.ids[1:]]
    assert all(one.ids[-1] == two.ids[0] for one, two in itertools.pairwise(pieces))
    assert all(len(piece.ids) == seq_len for piece in pieces[:-1])
    assert 2 <= len(pieces[-1].ids) <= seq_len
    assert all(piece.loss_mask == [0] + [1] * (len(piece.ids) - 1) for piece in pieces)


def test_a_dialog_of_just_the_sequence_length_fits_and_one_more_token_is_refused(tmp_path):
    path = write(tmp_path, {"text": "a"}, DIALOG)
    length = len(load(path)[1].ids)
    assert len(load(path, length)[1].ids) == length
    with pytest.raises(ValueError) as error:
        load(path, length - 1)
    assert str(error.value).startswith(f"{path}:2: the dialog has {length} tokens")
    assert f"sequence length {length - 1}: raise --seq-len, or split" in str(error.value)


ROLES = [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Hello!"}]
BAD_LINES = {
    '{"text": "a"': "malformed JSON: Expecting ',' delimiter at column 13",
    '{"text': "malformed JSON: Unterminated string starting at column 2",
    "text": "malformed JSON: Expecting value at column 1",
    "[" * 100_000: "malformed JSON: maximum recursion",
    '{"text": ' + "9" * 5000 + "}": "malformed JSON: Exceeds the limit",
    '["text"]': "must be a JSON object, not a list",
    '"text"': "must be a JSON object, not a string",
    "null": "must be a JSON object, not null",
    '{"text": "a", "id": 1, "text": "b"}': "the key 'text' is there twice: keep one of them",
    '{"text": "a", "about": [{"id": 1, "id": 1}]}': "the key 'id' is there twice",
    '{"messages": [{"role": "user", "content": "a", "role": "user"}]}': "the key 'role' is there",
    "3": "must be a JSON object, not a number",
    "{}": "; its keys: none",
    '{"txt": "a", "id": 1}': "'conversations', 'instruction'; its keys: 'txt', 'id'",
    '{"text": "a", "messages": []}': "its keys: 'text', 'messages'",
    '{"text": true}': "'text' must be a string, not a boolean",
    '{"text": null}': "'text' must be a string, not null",
    '{"text": " \\n"}': "'text' is blank: remove the line",
    '{"text": "a \\ud83d b"}': "\\ud83d is half of a surrogate pair",
    '{"messages": "Hi"}': "'messages' must be a list, not a string",
    '{"messages": []}': "a dialog needs at least one user message",
    '{"messages": ["Hi"]}': "message 1 of 1: must be",
    '{"messages": [{"role": "user"}]}': "message 1 of 1: must be",
    json.dumps({"messages": ROLES}): "message 2 of 2: unknown role 'bot'",
    json.dumps({"messages": ROLES[:1]}): "nothing to learn: the dialog has no answer",
    json.dumps({"messages": [*ROLES[:1], *ROLES[:1]]}): "role is 'user' where 'assistant' is due",
    b'{"text": "caf\xe9"}': "not UTF-8 text (byte 14 is 0xe9): save the file as UTF-8",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path, line, reason):
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(ValueError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_an_empty_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"empty.jsonl: the file is empty"):
        load(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent.jsonl: no such file"):
        load(tmp_path / "absent.jsonl")


def test_a_sequence_length_without_room_for_a_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sequence length of 1 has nothing to learn"):
        load(write(tmp_path, GOOD), seq_len=1)


# ---- Rows -----------------------------------------------------------------------------------


def test_a_target_is_the_token_that_follows_where_the_mask_says_so():
    examples = [Example([1, 7, 8, 9, 2], [0, 0, 0, 1, 1]), Example([1, 5, 2], [0, 1, 1])]
    batch = collate(examples, PAD)
    tokens, targets = batch.tokens, batch.targets
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.tolist() == [[1, 7, 8, 9], [1, 5, PAD, PAD]]
    assert targets.tolist() == [[-100, -100, 9, 2], [5, 2, -100, -100]]


def test_padding_is_no_target_even_when_it_is_the_end_token():
    end = TOKENIZER.pad_id
    batch = collate([Example([1, 5, end], [0, 1, 1])], pad_id=end, width=6)
    assert batch.tokens.tolist() == [[1, 5, end, end, end, end]]
    assert batch.targets.tolist() == [[5, end, -100, -100, -100, -100]]


# ---- Batches --------------------------------------------------------------------------------

lengths = st.lists(st.integers(2, 20), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths, st.integers(1, 6), st.sampled_from([1, 2, 3, 4]), st.integers(0, 9), st.integers())
def test_ranks_share_out_the_same_global_batch(lengths, rows, world_size, step, seed):
    examples, global_batch = numbered(lengths), rows * world_size
    whole = Batches(examples, global_batch, seed, PAD).batch(step)
    for rank in range(world_size):
        share = Batches(examples, global_batch, seed, PAD, rank, world_size).batch(step)
        assert share.tokens.equal(whole.tokens[rank::world_size])
        assert share.targets.equal(whole.targets[rank::world_size])


@settings(deadline=None)
@given(lengths, st.integers(1, 8), st.integers(-(2**70), 2**70))
def test_every_epoch_holds_every_example_once_and_ends_with_a_step_of_its_own(lengths, rows, seed):
    examples = numbered(lengths)
    batches = Batches(examples, rows, seed, PAD)
    steps = -(-len(examples) // rows)
    assert batches.steps(3) == 3 * steps
    starts = sorted(example.ids[0] for example in examples)
    for epoch in range(3):
        taken = [batches.batch(step) for step in range(epoch * steps, (epoch + 1) * steps)]
        assert all(len(batch.tokens) == rows for batch in taken)
        firsts = [i for batch in taken for i in first_ids(batch)]
        assert sorted(firsts[: len(examples)]) == starts
        blank = steps * rows - len(examples)
        assert firsts[len(examples) :] == [PAD] * blank
        assert (taken[-1].targets[rows - blank :] == -100).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    examples = numbered([3] * 50)

    def order(seed, epoch):
        return tuple(first_ids(Batches(examples, 50, seed, PAD).batch(epoch)))

    assert len({order(seed, epoch) for seed in range(-2, 4) for epoch in range(6)}) == 36
    assert len({order(seed, 1) for seed in (5, 2**32 + 5, 2**33 + 5)}) == 3


def test_a_batch_depends_on_its_step_and_on_no_batch_before_it():
    examples = numbered([4] * 7)
    one, other = (Batches(examples, 4, 3, PAD) for _ in range(2))
    forwards = [first_ids(one.batch(step)) for step in range(9)]
    backwards = [first_ids(other.batch(step)) for step in reversed(range(9))]
    assert forwards == backwards[::-1]


def test_the_order_of_a_seed_is_the_one_it_has_always_been():
    # A run is resumed by its step alone, so another order would repeat and skip examples.
    batches = Batches(numbered([2] * 8), 8, 0, PAD)
    assert first_ids(batches.batch(0)) == [15, 9, 11, 7, 5, 1, 13, 3]
    assert first_ids(batches.batch(1)) == [5, 7, 3, 9, 1, 15, 11, 13]


@settings(deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 5))
def test_width_is_the_longest_row_rounded_up_to_8_but_never_wider_than_any_example(
    lengths, rows, step
):
    batch = Batches(numbered(lengths), rows, 0, PAD).batch(step)
    longest = int((batch.targets != -100).sum(1).max())
    assert batch.tokens.shape == batch.targets.shape
    assert batch.tokens.shape[1] == min(-(-longest // 8) * 8, max(lengths) - 1)


@settings(deadline=None)
@given(lengths, st.sampled_from([1, 2, 3, 4]), st.integers(0, 5))
def test_the_targets_of_a_step_are_those_of_all_ranks(lengths, world_size, step):
    examples = [Example(ids, [i % 3 != 0 for i in ids]) for ids, _ in numbered(lengths)]
    shares = [Batches(examples, 12, 0, PAD, rank, world_size) for rank in range(world_size)]
    targets = sum(int((share.batch(step).targets != -100).sum()) for share in shares)
    assert {share.size(step).targets for share in shares} == {targets}


def test_batches_that_cannot_be_made_are_refused():
    examples = numbered([4])
    with pytest.raises(ValueError, match=r"6 sequences cannot .* evenly by 4 .* a multiple of 4"):
        Batches(examples, 6, 0, PAD, rank=0, world_size=4)
    with pytest.raises(ValueError, match="batch of 0 sequences"):
        Batches(examples, 0, 0, PAD)
    with pytest.raises(ValueError, match="no examples"):
        Batches([], 4, 0, PAD)
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        Batches(examples, 4, 0, PAD, rank=2, world_size=2)
    with pytest.raises(ValueError, match="step -1 is negative"):
        Batches(examples, 4, 0, PAD).batch(-1)


# ---- Evaluation -----------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 9), max_size=30), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 5])
)
def test_evaluation_takes_each_example_once_in_equally_many_batches(lengths, size, world_size):
    examples = numbered(lengths)
    ranks = [
        list(eval_batches(examples, size, PAD, rank, world_size)) for rank in range(world_size)
    ]
    shapes = [[batch.tokens.shape for batch in batches] for batches in ranks]
    assert all(other == shapes[0] for other in shapes)
    assert len(shapes[0]) == -(-len(examples) // (size * world_size))
    assert all(shape[0] <= size for shape in shapes[0])
    targets = torch.cat(
        [b.targets.flatten() for batches in ranks for b in batches] or [torch.empty(0)]
    )
    expected = [i for example in examples for i in example.ids[1:]]
    assert sorted(targets[targets != -100].tolist()) == expected


def test_a_rank_without_examples_gets_a_batch_without_targets():
    (batch,) = eval_batches(numbered([5]), 4, PAD, rank=2, world_size=3)
    assert batch.tokens.shape == (1, 4)
    assert (batch.targets == -100).all()


def test_an_evaluation_that_cannot_be_made_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="batch size of 0"):
        eval_batches(numbered([5]), 0, PAD)
    with pytest.raises(ValueError, match="rank 1 is not one of 1"):
        eval_batches(numbered([5]), 1, PAD, rank=1)
