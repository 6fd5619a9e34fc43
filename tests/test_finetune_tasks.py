"""Claims about the default run's tasks: right answers, an honest split, a fitting tokenizer."""

import hashlib
import itertools
import os
import re
import string
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.chat import encode_dialog
from llama.finetune import tasks
from llama.finetune.tasks import KINDS, TOKENIZER_PATH, build_tokenizer, is_held_out, make_dialogs
from llama.tokenizer import Tokenizer

WORD, NUMBER = "([a-z]{5})", "([1-9][0-9]{2})"
# What each kind's prompts look like and how they are answered, written down once more.
SPECIFIED = {
    "reverse": (f"Reverse the word {WORD}\\.", lambda word: "".join(reversed(word))),
    "sort": (f"Sort the letters of {WORD}\\.", lambda word: "".join(sorted(word))),
    "capitals": (f"Write {WORD} in capital letters\\.", str.upper),
    "add": (f"What is {NUMBER} plus {NUMBER}\\?", lambda a, b: str(int(a) + int(b))),
    "larger": (f"Which is larger, {NUMBER} or {NUMBER}\\?", lambda a, b: max(a, b, key=int)),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TOKENIZER_PATH)


@pytest.fixture(scope="module")
def training():
    return make_dialogs(20_000, seed=0, held_out=False)


@pytest.fixture(scope="module")
def held_out():
    return make_dialogs(5_000, seed=0, held_out=True)


def prompts(dialogs):
    return [messages[0]["content"] for _, messages in dialogs]


# ---- The tasks ------------------------------------------------------------------------------


def test_there_are_at_least_four_kinds_of_100_000_prompts_each():
    assert len(KINDS) >= 4
    assert all(kind.prompts >= 100_000 for kind in KINDS.values())


def test_the_numbers_of_prompts_are_those_of_the_ranges_drawn_from():
    numbers = range(100, 1000)
    pairs = list(itertools.product(numbers, numbers))
    assert KINDS["add"].prompts == sum(a + b <= 999 for a, b in pairs) == 320_400
    assert KINDS["larger"].prompts == sum(a != b for a, b in pairs) == 809_100
    for kind in ("reverse", "sort", "capitals"):
        assert KINDS[kind].prompts == 26**5 == 11_881_376


def test_draws_reach_the_whole_of_the_ranges(training):
    drawn = {kind: [] for kind in KINDS}
    for kind, messages in training:
        gaps = re.fullmatch(SPECIFIED[kind][0], messages[0]["content"]).groups()
        drawn[kind].append(gaps)
    for kind in ("reverse", "sort", "capitals"):
        for letters in zip(*(word for (word,) in drawn[kind]), strict=True):
            assert set(letters) == set(string.ascii_lowercase)
    for kind, largest in (("add", 899), ("larger", 999)):
        for operand in zip(*drawn[kind], strict=True):
            assert min(map(int, operand)) < 110
            assert max(map(int, operand)) > largest - 60


def test_every_dialog_is_a_prompt_of_its_kind_with_the_right_answer(training, held_out):
    for kind, messages in training + held_out:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        prompt, answer = (message["content"] for message in messages)
        pattern, solve = SPECIFIED[kind]
        assert answer == solve(*re.fullmatch(pattern, prompt).groups())


def test_held_out_dialogs_hold_equally_many_of_each_kind(held_out):
    kinds = [kind for kind, _ in held_out[: 50 * len(KINDS)]]
    assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 50)


def test_training_dialogs_hold_each_kind_by_its_weight(training):
    total = sum(kind.weight for kind in KINDS.values())
    kinds = [kind for kind, _ in training[: 100 * total]]
    assert all(kinds.count(kind.name) == 100 * kind.weight for kind in KINDS.values())


# ---- The split ------------------------------------------------------------------------------


def test_no_held_out_prompt_is_ever_trained_on_whatever_the_seeds(held_out):
    trained = set()
    for seed in range(5):
        trained.update(prompts(make_dialogs(10_000, seed, held_out=False)))
    assert not trained & set(prompts(held_out))
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, prompts(held_out)))


@settings(deadline=None)
@given(st.text())
def test_the_split_hangs_on_sha256_of_the_prompt_alone(prompt):
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    assert is_held_out(prompt) == (int(digest[:16], 16) % 16 == 0)


def test_dialogs_and_split_are_the_same_in_a_process_with_other_string_hashes(training, held_out):
    program = (
        "import runpy, sys\n"  # the file alone, without the seconds that torch takes to import
        "make_dialogs = runpy.run_path(sys.argv[1])['make_dialogs']\n"
        "print([make_dialogs(500, 0, split) for split in (False, True)])"
    )
    for hash_seed in ("1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", program, tasks.__file__],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        assert child.stdout.strip() == repr([training[:500], held_out[:500]])


def test_about_one_prompt_in_sixteen_is_held_out():
    words = map("".join, itertools.product("abcdefgh", repeat=5))
    share = sum(is_held_out(f"Reverse the word {word}.") for word in words) / 8**5
    assert share == pytest.approx(1 / 16, rel=0.05)


def test_dialogs_of_one_call_differ_and_another_seed_gives_others(training, held_out):
    assert len(set(prompts(training))) == len(training)
    assert len(set(prompts(held_out))) == len(held_out)
    assert make_dialogs(100, 0, held_out=True) == held_out[:100]
    assert not set(prompts(make_dialogs(100, 1, held_out=True))) & set(prompts(held_out)[:100])


@pytest.mark.parametrize("split", [True, False])
def test_more_dialogs_than_a_split_has_are_refused_with_the_limit(split):
    with pytest.raises(ValueError, match=r"cannot make 10000000 .* ask for 0 to \d+"):
        make_dialogs(10_000_000, 0, held_out=split)
    with pytest.raises(ValueError, match="cannot make -1 "):
        make_dialogs(-1, 0, held_out=split)


# ---- The tokenizer --------------------------------------------------------------------------


def test_a_letter_of_a_word_and_a_digit_of_a_number_are_one_token_each(tokenizer, training):
    single = {c: tokenizer.encode(c)[-1] for c in string.ascii_letters + string.digits}
    assert len(set(single.values())) == len(single)
    for _, messages in training[:2000]:
        prompt, answer = (message["content"] for message in messages)
        ids, _ = encode_dialog(tokenizer, messages)
        gaps = [c for text in re.findall(r"\b(?:[a-z]{5}|\d{3})(?=[ .?])", prompt) for c in text]
        inputs = [c for c in gaps if single[c] in ids]
        assert len(inputs) == len(gaps)
        assert ids[-2 - len(answer) : -2] == [single[c] for c in answer]


def test_a_word_that_looks_like_the_wording_is_still_read_letter_by_letter(tokenizer):
    for word in ("write", "words", "isplu", "which", "sorts"):
        for wording in ("Reverse the word {}.", "Write {} in capital letters."):
            ids = tokenizer.encode(f"[INST] {wording.format(word)} [/INST]")
            assert ids[2:7] == tokenizer.encode(word)[1:]


def test_a_dialog_fits_in_17_ids_so_a_batch_is_16_positions_wide(tokenizer, training):
    assert {len(encode_dialog(tokenizer, messages)[0]) for _, messages in training} == {17}


def test_only_answer_and_end_bear_loss_and_the_prompt_alone_is_a_prefix(tokenizer, held_out):
    for _, messages in held_out[:500]:
        ids, loss_mask = encode_dialog(tokenizer, messages)
        prompt, _ = encode_dialog(tokenizer, messages[:1])
        assert loss_mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        assert ids[: len(prompt)] == prompt
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids[len(prompt) :]).strip() == messages[1]["content"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00\u2581")))
def test_any_text_is_encoded_and_comes_back(text):
    tokenizer = Tokenizer(TOKENIZER_PATH)
    ids = tokenizer.encode(text)
    assert 0 not in ids  # the unknown token
    assert tokenizer.decode(ids) == text


def test_special_ids_are_llamas_and_the_vocabulary_is_small(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.vocab_size < 400


def test_the_shipped_tokenizer_is_what_the_program_builds(tmp_path, tokenizer, training):
    build_tokenizer(tmp_path / "new.model")
    new = Tokenizer(tmp_path / "new.model")
    assert new.vocab_size == tokenizer.vocab_size
    texts = ["Hëllo,\n Llama!", *map(str, training[:200])]
    assert [new.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]


def test_the_module_builds_the_tokenizer_and_prints_dialogs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tasks", "--build-tokenizer", str(tmp_path / "t.model")])
    tasks.main()
    assert Tokenizer(tmp_path / "t.model").vocab_size == Tokenizer(TOKENIZER_PATH).vocab_size
    monkeypatch.setattr(sys, "argv", ["tasks"])
    tasks.main()
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in KINDS)
