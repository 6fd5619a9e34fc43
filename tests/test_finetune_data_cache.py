"""Claims about the cache of tokenised files: what is found again, and who writes it."""

import errno
import json
import os
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pool import SERVER

from llama.finetune.data import Batches, cache, load, reading, store
from llama.finetune.tasks import TOKENIZER_PATH, build_tokenizer
from llama.tokenizer import Tokenizer


class CountingTokenizer(Tokenizer):
    """Writes a line to `log` for every batch it encodes, after which it waits, in seconds."""

    def __init__(self, log, *waits):
        super().__init__(TOKENIZER_PATH)
        self.log, self.waits = log, iter(waits)

    def encode_batch(self, texts, threads=1):
        if texts:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(next(self.waits, 0.0))
        return super().encode_batch(texts, threads)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def write(path, count, start=0):
    lines = [{"text": f"line {start + number:04} of the file"} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def encoded(log):
    """The processes that encoded a batch, one for each batch."""
    return log.read_text().split() if log.exists() else []


def texts(corpus, tokenizer=None):
    tokenizer = tokenizer or Tokenizer(TOKENIZER_PATH)
    return [tokenizer.decode(example.ids.tolist()) for example in corpus]


def entries(folder):
    """The stores in a cache, whole or not."""
    return sorted(e for e in folder.iterdir() if e.name not in ("hashes", "locks"))


# ---- What is found again --------------------------------------------------------------------


def test_a_second_run_reads_no_text_and_finds_the_same(tmp_path, log, monkeypatch):
    path, tokenizer = write(tmp_path / "a.jsonl", 20), CountingTokenizer(log)
    path.write_text(path.read_text() + "{}\n")
    (tmp_path / "a.txt").write_text("a novel")
    runs = [
        load([path, tmp_path / "a.txt"], tokenizer, 64, "auto", "skip", tmp_path / "cache")
        for _ in range(2)
    ]
    assert len(encoded(log)) == 2
    assert texts(runs[0]) == texts(runs[1])
    assert len(texts(runs[1])) == 21
    assert runs[0].refused == runs[1].refused
    assert runs[0].refused[0].line == 21
    assert runs[0].digest == runs[1].digest


def test_the_cache_does_not_depend_on_the_sequence_length_or_the_files_name(tmp_path, log):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), CountingTokenizer(log)
    short = load([path], tokenizer, 8, cache_dir=tmp_path / "cache")
    path.rename(tmp_path / "b.jsonl")
    long = load([tmp_path / "b.jsonl"], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert len(encoded(log)) == 1
    assert len(short) > len(long) == 5
    assert long.place(4) == f"{tmp_path / 'b.jsonl'}:5"


def test_another_tokenizer_or_template_is_another_entry(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "a", "output": "b"}))
    build_tokenizer(tmp_path / "other.model")
    model = bytearray((tmp_path / "other.model").read_bytes())
    (tmp_path / "other.model").write_bytes(model.replace(b"[INST]", b"[ASKS]"))
    other = Tokenizer(tmp_path / "other.model")
    for tokenizer, template in [
        (Tokenizer(TOKENIZER_PATH), "alpaca"),
        (Tokenizer(TOKENIZER_PATH), "llama2"),
        (other, "llama2"),
    ]:
        cached, anew = (
            load([path], tokenizer, 512, template, cache_dir=place)[0].ids.tolist()
            for place in (tmp_path / "cache", None)
        )
        assert cached == anew
    assert len(entries(tmp_path / "cache")) == 3


def test_a_change_of_the_content_is_noticed_at_the_same_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SETTLED_NS", -(10**12))  # the hash is noted however new the file
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)
    before = path.stat()
    first = load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 1
    time.sleep(0.02)  # a tick of the file system's clock
    write(path, 5, start=10)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        *(before.st_size, before.st_mtime_ns, before.st_ino),
    )
    second = load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert texts(first)[0] == "line 0000 of the file"  # still there, for a run that goes on
    assert texts(second)[0] == "line 0010 of the file"


def test_a_files_hash_is_noted_only_once_its_time_of_change_is_past(tmp_path, monkeypatch):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)
    hashes = tmp_path / "cache" / "hashes"
    load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert not list(hashes.iterdir())
    now = time.time_ns()
    monkeypatch.setattr(cache.time, "time_ns", lambda: now + 3 * 10**9)
    load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    (note,) = hashes.iterdir()
    monkeypatch.setattr(cache.hashlib, "file_digest", None)  # not hashed again
    load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    monkeypatch.undo()
    note.write_text("")  # as after a loss of power
    load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert len(entries(tmp_path / "cache")) == 1


def test_a_large_file_that_is_new_is_waited_for_and_then_its_hash_noted(tmp_path, monkeypatch):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)
    monkeypatch.setattr(cache, "LARGE_BYTES", path.stat().st_size)
    monkeypatch.setattr(cache, "SETTLED_NS", 4 * 10**8)
    load([write(path, 5)], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 1
    assert time.time_ns() - path.stat().st_ctime_ns > 4 * 10**8


@pytest.mark.parametrize("name", ["ids.bin", "learnt.bin", "offsets.bin", "about.json"])
@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_an_entry_that_is_cut_short_or_lacks_a_file_is_made_anew(tmp_path, log, name, damage):
    path, tokenizer = tmp_path / "a.jsonl", CountingTokenizer(log)
    path.write_text(json.dumps({"instruction": "a", "output": "b"}))
    first = load([path], tokenizer, 512, cache_dir=tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    part = entry / name
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        part.unlink()
    second = load([path], tokenizer, 512, cache_dir=tmp_path / "cache")
    assert len(encoded(log)) == 2
    assert second[0].ids.tolist() == first[0].ids.tolist()
    assert second[0].loss_mask.tolist() == first[0].loss_mask.tolist()
    assert entries(tmp_path / "cache") == [entry]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, log):
    path = write(tmp_path / "a.jsonl", 5)

    class Meddling(CountingTokenizer):
        def encode_batch(self, texts, threads=1):
            time.sleep(0.02)
            write(path, 6)
            return super().encode_batch(texts, threads)

    with pytest.raises(ValueError, match=r"a.jsonl: the file changed while it was read"):
        load([path], Meddling(log), 64, cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []
    assert len(load([path], CountingTokenizer(log), 64, cache_dir=tmp_path / "cache")) == 6


def test_a_file_that_changes_between_its_hash_and_its_tokens_is_refused(tmp_path, monkeypatch):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)
    original = cache._sha256

    def hash_then_change(*args):
        digest = original(*args)
        time.sleep(0.02)
        write(path, 6)
        return digest

    monkeypatch.setattr(cache, "_sha256", hash_then_change)
    with pytest.raises(ValueError, match=r"a.jsonl: the file changed while it was read"):
        load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, log):
    path = write(tmp_path / "a.jsonl", 5)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        with pytest.raises(ValueError, match=f"token cache {place} cannot be written .* --token-c"):
            load([path], CountingTokenizer(log), 64, cache_dir=place)
    assert not encoded(log)


def test_a_cache_without_room_or_locks_is_refused_and_nothing_is_left_of_it(tmp_path, monkeypatch):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)

    def fail(number):
        def call(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(cache, "read", fail(errno.ENOSPC))
    with pytest.raises(ValueError, match=r"cache .* has no room for .*a.jsonl \(No space left"):
        load([path], tokenizer, 64, cache_dir=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []
    monkeypatch.setattr(cache.fcntl, "flock", fail(errno.ENOLCK))
    with pytest.raises(ValueError, match=r"cache .* where files cannot be locked \(No locks"):
        load([path], tokenizer, 64, cache_dir=tmp_path / "cache")


@pytest.fixture
def read_only(monkeypatch):
    """Call it to have nothing written any more, as on a volume that is mounted read-only."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_to_read(path, mode="r", *args, original=Path.open, **kwargs):
        return original(path, mode, *args, **kwargs) if mode in ("r", "rb") else refuse()

    def begin():
        monkeypatch.setattr(Path, "open", open_to_read)
        for target, name in (
            *((Path, name) for name in ("write_text", "write_bytes", "rename", "unlink")),
            *((cache.tempfile, "TemporaryFile"), (os, "mkdir"), (cache.shutil, "rmtree")),
        ):
            monkeypatch.setattr(target, name, refuse)

    return begin


def test_a_warm_cache_that_cannot_be_written_is_used(tmp_path, log, monkeypatch, read_only):
    path, folder = write(tmp_path / "a.jsonl", 5), tmp_path / "cache"
    first = load([path], CountingTokenizer(log), 64, cache_dir=folder)
    tokenizer, cold = CountingTokenizer(log), write(tmp_path / "cold.jsonl", 6)
    read_only()
    monkeypatch.setattr(cache, "LARGE_BYTES", 0)  # which no note can be had for
    again = load([path], tokenizer, 64, cache_dir=folder)
    assert texts(again) == texts(first)
    assert again.digest == first.digest
    with pytest.raises(ValueError, match=r"cache .* cannot be written \(Read-only .* --token-c"):
        load([path, cold], tokenizer, 64, cache_dir=folder)
    assert len(encoded(log)) == 1


def test_a_cold_cache_that_cannot_be_written_is_refused_before_a_file_is_hashed(
    tmp_path, monkeypatch, read_only
):
    path, tokenizer = write(tmp_path / "a.jsonl", 5), Tokenizer(TOKENIZER_PATH)
    (tmp_path / "cache").mkdir()
    read_only()
    monkeypatch.setattr(cache.hashlib, "file_digest", None)
    with pytest.raises(ValueError, match=r"cache .* cannot be written \(Read-only file system\)"):
        load([path], tokenizer, 64, cache_dir=tmp_path / "cache")


# ---- Several at once, and killed ones -------------------------------------------------------


def load_in_process(path, log, folder, found, *waits):
    corpus = load([path], CountingTokenizer(log, *waits), 64, cache_dir=folder)
    found.put((len(corpus), texts(corpus)[-1]))


def start(*args):
    process = SERVER.Process(target=load_in_process, args=args)
    process.start()
    return process


def test_of_processes_that_start_at_once_exactly_one_tokenises(tmp_path, log):
    path, found = write(tmp_path / "a.jsonl", 100), SERVER.Queue()
    processes = [start(path, log, tmp_path / "cache", found, 0.5) for _ in range(3)]
    seen = [found.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert seen == [(100, "line 0099 of the file")] * 3
    assert len(encoded(log)) == 1
    assert len(entries(tmp_path / "cache")) == 1


def test_one_killed_while_tokenising_leaves_nothing_that_is_taken_for_whole(tmp_path, log):
    path, found = write(tmp_path / "a.jsonl", 40_000), SERVER.Queue()
    killed = start(path, log, tmp_path / "cache", found, 0.0, 60.0)  # in the second of two batches
    while killed.is_alive() and len(encoded(log)) < 2:
        time.sleep(0.02)
    (aside,) = entries(tmp_path / "cache")
    assert (aside / "ids.bin").exists()
    waiting = start(path, tmp_path / "other log", tmp_path / "cache", found)
    time.sleep(0.3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert found.get(timeout=30) == (40_000, "line 39999 of the file")
    waiting.join()
    (entry,) = entries(tmp_path / "cache")
    assert entry.name == aside.name.partition(".")[0]
    assert set(encoded(tmp_path / "other log")) == {str(waiting.pid)}


# ---- Memory ---------------------------------------------------------------------------------


def test_loading_takes_memory_by_the_document_and_not_by_the_token(tmp_path, monkeypatch):
    tokenizer = Tokenizer(TOKENIZER_PATH)
    peaks = {}
    for tokens_each in (100, 4000):
        path = tmp_path / f"{tokens_each}.npy"
        np.save(path, np.full((1000, tokens_each), 5, np.uint16))
        load([path], tokenizer, 4096, cache_dir=tmp_path / "cache")
        tracemalloc.start()
        batches = Batches(load([path], tokenizer, 4096, cache_dir=tmp_path / "cache"), 8, 0, 0)
        assert batches.size(0).targets == 8 * (tokens_each - 1)
        peaks[tokens_each] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert batches.corpus.lengths.sum() == 1000 * tokens_each
    assert peaks[4000] < peaks[100] + 10_000  # bytes; the ids take 8 MB


def test_tokenising_takes_memory_by_the_batch_and_not_by_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_BYTES", 2**10)
    monkeypatch.setattr(reading, "STRETCH_BYTES", 2**10)
    tokenizer = Tokenizer(TOKENIZER_PATH)
    line = json.dumps({"text": "ab" * 500}) + "\n"
    for suffix, content in (("jsonl", line), ("txt", "ab" * 500 + "\n")):
        path = tmp_path / f"long.{suffix}"
        path.write_text(content * 100)
        tracemalloc.start()
        load([path], tokenizer, 4096)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 290_000, suffix  # bytes; a list of the file's ids would take 800,000


def test_small_arrays_are_read_and_large_ones_mapped(tmp_path):
    tokenizer = Tokenizer(TOKENIZER_PATH)
    for count, kind in ((10, np.ndarray), (store.SMALL_BYTES, np.memmap)):
        np.save(tmp_path / "a.npy", np.full(count, 5, np.uint16))
        ids = load([tmp_path / "a.npy"], tokenizer, 64, cache_dir=tmp_path / "c")[0].ids
        while isinstance(ids.base, np.ndarray):
            ids = ids.base
        assert type(ids) is kind


def test_what_a_refused_document_has_written_is_not_kept(tmp_path):
    writer = store.Writer(tmp_path / "store", 300)
    writer.extend([1, 2, 3])
    writer.end_text(1)
    writer.extend([4, 5, 6, 7])
    writer.refuse(2, "no")
    writer.add(3, [8, 9], [0, 1])
    writer.extend([10])
    writer.refuse(4, "no")
    writer.finish()
    found = store.open_store(tmp_path / "store")
    assert found.ids.tolist() == [1, 2, 3, 8, 9]
    assert found.learnt.tolist() == [0, 1]
    assert found.offsets.tolist() == [0, 3, 5]
    assert found.lines.tolist() == [1, 3]
    assert found.refused == [(2, "no"), (4, "no")]
