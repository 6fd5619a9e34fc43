"""Claims about the digest by which a resumed run knows its data again."""

import json
import time

import pytest

from llama.finetune.data import Corpus, Example, Part, load
from llama.finetune.tasks import TOKENIZER_PATH, build_tokenizer
from llama.tokenizer import Tokenizer


def write(path, word):
    path.write_text("".join(json.dumps({"text": f"{word} {n}"}) + "\n" for n in range(5)))
    return path


@pytest.mark.parametrize("place", ["cache", None])
def test_the_digest_is_of_the_content_tokenizer_and_template_and_not_of_names(tmp_path, place):
    folder = place and tmp_path / place
    path, tokenizer = write(tmp_path / "a.jsonl", "one"), Tokenizer(TOKENIZER_PATH)

    def digest(path, template="auto", tokenizer=tokenizer):
        return load([path], tokenizer, 64, template, cache_dir=folder).digest

    base = digest(path)
    assert base == digest(path) == digest(path.rename(tmp_path / "b.jsonl"))
    same_lengths = write(tmp_path / "c.jsonl", "two")
    build_tokenizer(tmp_path / "other.model")
    model = (tmp_path / "other.model").read_bytes()
    (tmp_path / "other.model").write_bytes(model.replace(b"[INST]", b"[ASKS]"))
    other = Tokenizer(tmp_path / "other.model")
    path = tmp_path / "b.jsonl"
    others = [digest(same_lengths), digest(path, "plain"), digest(path, tokenizer=other)]
    assert len({base, *others}) == 4
    assert load([path], tokenizer, 64).digest == base  # with a cache or without


def test_the_digest_of_examples_at_hand_is_of_their_ids_and_masks_and_cheap():
    def digest(*examples):
        return Corpus([Example(*example) for example in examples]).digest

    base = digest(([1, 5, 2], [0, 1, 1]), ([1, 6], [0, 1]))
    assert base == digest(([1, 5, 2], [0, 1, 1]), ([1, 6], [0, 1]))
    others = [
        digest(([1, 5, 2], [0, 1, 1]), ([1, 7], [0, 1])),
        digest(([1, 5, 2], [0, 0, 1]), ([1, 6], [0, 1])),
        digest(([1, 6], [0, 1]), ([1, 5, 2], [0, 1, 1])),
        digest(([1, 5], [0, 1]), ([2, 1, 6], [1, 0, 1])),
    ]
    assert len({base, *others}) == 5
    corpus = Corpus([Example([1] * 20, [1] * 20)] * 150_000)
    began = time.process_time()
    assert corpus.digest
    assert time.process_time() - began < 0.3  # seconds, of every start of a run


def test_the_digest_holds_the_weights():
    whole = Corpus([Example([1, 2], [0, 1])] * 3)

    def digest(*weights):
        parts = [Part("", 0, 1, weights[0]), Part("", 1, 2, weights[1])]
        return Corpus.joined(whole._pieces, parts, []).digest

    assert digest(1, 1) == digest(1.0, 1.0)
    assert len({digest(1, 1), digest(1, 2), digest(2, 1)}) == 3
