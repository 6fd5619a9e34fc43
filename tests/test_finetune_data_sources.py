"""Claims about sources, text files and arrays of token ids."""

import json
import math
import os

import numpy as np
import pytest

from llama.finetune.data import Part, load, reading, source_of
from llama.finetune.tasks import TOKENIZER_PATH
from llama.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TOKENIZER_PATH)
VOCABULARY = TOKENIZER.vocab_size


def ids_of(corpus):
    """The ids of a corpus, each learnt token once, and the first of each document."""
    return [i for ids, mask in corpus for i, learnt in zip(ids, mask, strict=True) if learnt]


def save(path, array):
    np.save(path, np.asarray(array))
    return path


# ---- Sources --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with a file of each kind, and what may lie beside them."""
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "c.jsonl").write_text(json.dumps({"text": "c"}))
    (folder / "A.TXT").write_text("a")
    save(folder / "b.npy", [5, 6, 7])
    for name in ("README", "readme.rst", "LICENSE", "card.MD", ".hidden.jsonl", ".json"):
        (folder / name).write_text("not data")
    (folder / ".git").mkdir()
    return folder


def test_a_folder_is_its_files_of_a_known_kind_by_name(folder):
    corpus = load([folder], TOKENIZER, 64)
    names = [f"{folder / 'A.TXT'}:1", str(folder / "b.npy"), f"{folder / 'c.jsonl'}:1"]
    assert [corpus.place(i) for i in range(3)] == names
    assert corpus.parts == [Part(str(folder), 0, 3, 1.0)]


@pytest.mark.parametrize(
    "name", ["d.json", "a.jsonl.gz", "d.parquet", "d.csv", "data", "deeper/", "d.jsonl/", "x.md/"]
)
def test_a_folder_that_holds_what_would_be_left_out_is_refused_by_its_name(folder, name):
    left_out = folder / name
    left_out.mkdir() if name.endswith("/") else left_out.write_text("{}")
    (folder / "z.json").write_text("{}")  # the first of several is named
    what = "a folder" if name.endswith("/") else "no .jsonl, .txt or .npy file"
    with pytest.raises(ValueError) as error:
        source_of(folder)
    assert str(error.value) == (
        f"{left_out}: is {what}, and would be left out of the data in {folder}: "
        "name the files to read one by one, or move it elsewhere"
    )


def test_a_pipe_is_refused_with_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for argument in ("pipe", "pipe=2"):
        with pytest.raises(ValueError, match=r"/pipe: is no regular file: save it to one"):
            load([f"{tmp_path}/{argument}"], TOKENIZER, 64)
    reading_end, writing_end = os.pipe()
    with pytest.raises(ValueError, match=rf"/dev/fd/{reading_end}: is no regular file"):
        source_of(f"/dev/fd/{reading_end}")
    os.close(reading_end)
    os.close(writing_end)


def test_sources_are_parts_with_weights_in_the_order_given(folder):
    file = folder / "c.jsonl"
    corpus = load([f"{file}=0.25", str(folder), f"{file}=3"], TOKENIZER, 64)
    assert corpus.parts == [
        Part(str(file), 0, 1, 0.25),
        Part(str(folder), 1, 3, 1.0),
        Part(str(file), 4, 1, 3.0),
    ]
    assert len(corpus) == len(corpus.lengths) == len(corpus.learnt) == 5


def test_a_file_that_is_really_named_with_an_equals_sign_wins(tmp_path):
    for name in ("a=2", "a"):
        (tmp_path / name).write_text(json.dumps({"text": "a"}))
    assert source_of(f"{tmp_path}/a=2").weight == 1.0
    assert source_of(f"{tmp_path}/a=2=2") == (f"{tmp_path}/a=2", [tmp_path / "a=2"], 2.0)
    (tmp_path / "a=2").unlink()
    assert source_of(f"{tmp_path}/a=2") == (f"{tmp_path}/a", [tmp_path / "a"], 2.0)


def test_what_is_no_source_is_refused_by_name(tmp_path, folder):
    file = folder / "c.jsonl"
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"c.jsonl={weight}: a weight must be a number above"):
            load([f"{file}={weight}"], TOKENIZER, 64)
    with pytest.raises(FileNotFoundError, match=r"c.jsonl=x: no such file, and 'x' is no weight"):
        load([f"{file}=x"], TOKENIZER, 64)
    with pytest.raises(FileNotFoundError, match=r"absent.jsonl: no such file"):
        load([file, f"{tmp_path}/absent.jsonl=2"], TOKENIZER, 64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: the folder holds no .jsonl, .txt or .npy file"):
        load([tmp_path / "empty"], TOKENIZER, 64)
    with pytest.raises(ValueError, match="there is no data"):
        load([], TOKENIZER, 64)
    with pytest.raises(ValueError, match="template 'chatml' is unknown; there are auto, llama2"):
        load([file], TOKENIZER, 64, template="chatml")
    with pytest.raises(ValueError, match="on_bad_line 'ignore' is unknown; there are error, skip"):
        load([file], TOKENIZER, 64, on_bad_line="ignore")


# ---- Texts ----------------------------------------------------------------------------------


def test_a_text_file_is_one_document_without_its_byte_order_mark_and_carriage_returns(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n\r\nb \n")
    (example,) = load([path], TOKENIZER, 64)
    assert example.ids.tolist() == TOKENIZER.encode("caf\u00e9\n\nb \n", bos=True, eos=True)
    pieces = load([path], TOKENIZER, 4)
    assert len(pieces) == math.ceil((len(example.ids) - 1) / 3)
    assert ids_of(pieces) == example.ids.tolist()[1:]


@pytest.mark.parametrize("stretch", [1, 5, 40])
def test_a_text_read_in_stretches_has_the_ids_of_the_whole(tmp_path, monkeypatch, stretch):
    monkeypatch.setattr(reading, "STRETCH_BYTES", stretch)
    text = "\n\nIt was  a dark\n night; \n\n\n  the rain fell in torrents\n" * 5 + "\n\nThe end"
    path = tmp_path / "novel.txt"
    for ending in ("", "\n", "\n\n"):
        path.write_text(text + ending)
        (example,) = load([path], TOKENIZER, 2000)
        assert example.ids.tolist() == TOKENIZER.encode(text + ending, bos=True, eos=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a\nb [INST] c\n", ":2: text holds the chat format's tag [INST]: write its turns as"),
        (b"a\n\nb\xff", ":3: not UTF-8 text (byte 2 is 0xff): save the file as UTF-8"),
        (b"", ": the file is empty: it needs text"),
        (b" \n \n", ": the file is empty: it needs text"),
    ],
)
def test_a_text_file_that_cannot_be_learnt_from_is_refused_with_its_line(tmp_path, content, reason):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        load([path], TOKENIZER, 64)
    assert str(error.value).startswith(f"{path}{reason}")
    with pytest.raises(ValueError, match=r"bad.txt: "):
        load([path], TOKENIZER, 64, on_bad_line="skip")


# ---- Arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "uint16", ">i4"])
def test_a_1d_array_is_a_stream_cut_at_the_sequence_length(tmp_path, dtype):
    ids = np.arange(3, 3 + 20).astype(dtype)
    corpus = load([save(tmp_path / "a.npy", ids)], TOKENIZER, 8)
    assert [len(example.ids) for example in corpus] == [8, 8, 6]
    assert ids_of(corpus) == ids.tolist()[1:]
    assert corpus[0].ids[0] == 3


def test_a_2d_array_is_a_document_a_row(tmp_path):
    rows = np.arange(12).reshape(3, 4)
    corpus = load([save(tmp_path / "a.npy", rows)], TOKENIZER, 64)
    assert [example.ids.tolist() for example in corpus] == rows.tolist()
    assert all(example.loss_mask.tolist() == [0, 1, 1, 1] for example in corpus)
    assert corpus.place(2) == f"{tmp_path / 'a.npy'}:3"


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ([1, 2, VOCABULARY], f": token 3 is {VOCABULARY}, not an id of the tokenizer's (0 to "),
        ([1, -1], ": token 2 is -1, not an id"),
        (np.array([2**63], np.uint64).repeat(2), ": token 1 is 9223372036854775808, not an id"),
        ([[1, 2], [1, VOCABULARY]], f":2: token 2 is {VOCABULARY}, not an id"),
        ([1.0, 2.0], ": must hold token ids, 1-D or 2-D whole numbers, not 1-D float64"),
        (np.zeros((2, 2, 2), int), "not 3-D int64"),
        (5, "not 0-D int64"),
        ([7], ": a single token has nothing to learn"),
        ([[7], [8]], ": rows of 1 tokens have nothing to learn"),
        (np.zeros(0, int), ": the file is empty: it needs token ids"),
        (np.array(["a", None], object), ": not an array of numpy's"),
    ],
)
def test_an_array_that_holds_no_ids_of_the_tokenizer_is_refused_by_place(tmp_path, array, reason):
    path = tmp_path / "a.npy"
    np.save(path, np.asarray(array), allow_pickle=True)
    with pytest.raises(ValueError) as error:
        load([path], TOKENIZER, 64)
    assert reason in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_no_array_and_an_archive_are_refused(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"a.npy: not an array of numpy's"):
        load([tmp_path / "a.npy"], TOKENIZER, 64)
    with (tmp_path / "a.npy").open("wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(ValueError, match=r"a.npy: is an archive: save each array in a file"):
        load([tmp_path / "a.npy"], TOKENIZER, 64)


def test_rows_with_a_foreign_id_are_skipped_when_asked_for_and_the_others_kept(tmp_path):
    path = save(tmp_path / "a.npy", [[1, 2], [1, VOCABULARY], [3, 4]])
    corpus = load([path], TOKENIZER, 64, on_bad_line="skip")
    assert [example.ids.tolist() for example in corpus] == [[1, 2], [3, 4]]
    assert [refused.line for refused in corpus.refused] == [2]
