"""The SentencePiece tokenizer, on a model trained here."""

import io

import pytest
import sentencepiece

from llama import LlamaConfig, Tokenizer


def train(path, **changes):
    """A BPE model with byte fallback of 300 pieces, as Llama 2's is of 32,000."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog and the cat ran on"] * 20),
        model_writer=model,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "vocab_size": 300,
            "minloglevel": 2,
            "hard_vocab_limit": False,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            **changes,
        },
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def test_text_comes_back_from_its_ids_even_outside_the_alphabet(model_path):
    tokenizer = Tokenizer(model_path)
    for text in ("the cat sat", "two  blanks\nand a line", "caf\u00e9 \U0001f600"):
        ids = tokenizer.encode(text, bos=True, eos=True)
        assert ids[0] == tokenizer.bos_id == 1
        assert ids[-1] == tokenizer.eos_id == 2
        assert tokenizer.decode(ids) == text


def test_control_tokens_in_text_are_plain_characters(model_path):
    tokenizer = Tokenizer(model_path)
    ids = tokenizer.encode("</s><s>")
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.encode("") == []


def test_a_batch_of_texts_has_the_ids_of_each_in_order_on_any_number_of_threads(model_path):
    tokenizer = Tokenizer(model_path)
    texts = ["the cat", "", "a dog \U0001f600", *(f"{number} cats" for number in range(50))]
    expected = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == tokenizer.encode_batch(texts, threads=3) == expected
    assert tokenizer.encode_batch([], threads=3) == []


def test_a_token_has_its_piece_and_an_id_beyond_the_vocabulary_has_none(model_path):
    tokenizer = Tokenizer(model_path)
    assert tokenizer.piece(tokenizer.eos_id) == "</s>"
    assert tokenizer.piece(tokenizer.vocab_size) == tokenizer.piece(-1) == "<unused>"


def test_padding_is_eos_unless_the_model_has_a_token_for_it(model_path, tmp_path):
    assert Tokenizer(model_path).pad_id == Tokenizer(model_path).eos_id
    assert Tokenizer(train(tmp_path / "padded.model", pad_id=3)).pad_id == 3


def test_an_id_beyond_the_vocabulary_decodes_as_unknown(model_path):
    tokenizer = Tokenizer(model_path)
    ids = [*tokenizer.encode("cat"), tokenizer.vocab_size + 7]
    assert tokenizer.decode(ids).startswith("cat")


def test_a_missing_or_foreign_file_is_named(tmp_path, model_path):
    with pytest.raises(FileNotFoundError, match=r"none\.model: no such file"):
        Tokenizer(tmp_path / "none.model")
    for content in (b"", b"{}", b"not a model at all", model_path.read_bytes()[:1000]):
        (tmp_path / "foreign.model").write_bytes(content)
        with pytest.raises(ValueError, match=r"foreign\.model: not a SentencePiece model"):
            Tokenizer(tmp_path / "foreign.model")


def test_a_model_without_end_token_is_refused(tmp_path):
    path = train(tmp_path / "endless.model", eos_id=-1)
    with pytest.raises(ValueError, match=r"endless\.model: has no begin or no end token"):
        Tokenizer(path)


def test_meta_vocabulary_of_minus_one_is_the_tokenizers(tmp_path, model_path):
    (tmp_path / "7B").mkdir()
    (tmp_path / "7B" / "params.json").write_text(
        '{"dim": 64, "n_layers": 1, "n_heads": 4, "multiple_of": 32, "vocab_size": -1}'
    )
    (tmp_path / "tokenizer.model").write_bytes(model_path.read_bytes())
    config = LlamaConfig.from_meta(tmp_path / "7B")
    assert config.vocab_size == Tokenizer(model_path).vocab_size
