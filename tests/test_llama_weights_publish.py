"""A save is whole or absent: existing folders, failures, full disks, killed processes, memory."""

import errno
import os
import resource
import shutil
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import SERVER
from test_llama_weights import CONFIG, UNEVEN, filled, shard
from torch.distributed import fsdp
from torch.profiler import ProfilerActivity, profile

from llama import LlamaConfig
from llama.weights import load_hf, load_meta, ranges, save_hf, save_meta
from llama.weights.convert import convert

SAVES = {"hf": save_hf, "meta": save_meta}


@pytest.mark.parametrize("kind", SAVES)
def test_an_existing_export_is_never_overwritten(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    SAVES[kind](filled(CONFIG), tmp_path / "empty")
    before = {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    with pytest.raises(ValueError, match="empty: exists; remove it or choose another"):
        SAVES[kind](filled(CONFIG, seed=1), tmp_path / "empty")
    assert {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_that_fails_leaves_nothing_behind(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=r"none\.model"):
        SAVES[kind](filled(CONFIG), tmp_path / "export", tokenizer_path=tmp_path / "none.model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", SAVES)
def test_a_type_that_weights_are_not_kept_in_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"weight cannot be saved as torch\.int8"):
        SAVES[kind](filled(CONFIG), tmp_path / "export", dtype=torch.int8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", SAVES)
def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, monkeypatch, kind):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"take \d\d,\d\d\d bytes, but 10,000 are free"):
        SAVES[kind](filled(CONFIG), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", SAVES)
def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path, monkeypatch, kind):
    original, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        SAVES[kind](filled(CONFIG), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def fail_on_rank_one(root: str, kind: str) -> str:
    model = shard(UNEVEN, fsdp)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            SAVES[kind](model, Path(root, "export"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", SAVES)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path, run_ranks, kind):
    errors = run_ranks(3, fail_on_rank_one, str(tmp_path), kind)
    assert errors[1].startswith("OSError: [Errno 27] File too large")
    for rank in (0, 2):
        assert errors[rank] == f"RuntimeError: nothing was saved: rank 1 failed with {errors[1]}"
    assert list(tmp_path.iterdir()) == []


def save_and_stick(kind: str, target: Path, writing: Event) -> None:
    def stick(*_: object) -> None:
        writing.set()
        time.sleep(60)

    os.pwrite = stick
    SAVES[kind](filled(CONFIG), target)


@pytest.mark.parametrize("kind", SAVES)
def test_what_a_killed_save_left_goes_with_the_next_and_a_living_one_is_respected(tmp_path, kind):
    target = tmp_path / "export"
    writing = SERVER.Event()
    process = SERVER.Process(target=save_and_stick, args=(kind, target, writing))
    process.start()
    try:
        assert writing.wait(timeout=60)
        unfinished = list(tmp_path.iterdir())
        assert [p.name.startswith(".export.unfinished-") for p in unfinished] == [True]
        with pytest.raises(ValueError, match="export: another process is saving to it"):
            SAVES[kind](filled(CONFIG), target)
        assert list(tmp_path.iterdir()) == unfinished
    finally:
        process.kill()
        process.join()
    assert list(tmp_path.iterdir()) == unfinished
    (tmp_path / ".export.unfinished-of-somebody").mkdir()
    (tmp_path / ".export2.unfinished-01234567").mkdir()
    SAVES[kind](filled(CONFIG), target)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"export", ".export.unfinished-of-somebody", ".export2.unfinished-01234567"}


def test_a_file_system_without_locks_is_saved_to_and_nothing_on_it_deleted(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    (tmp_path / ".export.unfinished-01234567").mkdir()
    monkeypatch.setattr("fcntl.flock", unsupported)
    save_hf(filled(CONFIG), tmp_path / "export")
    assert {p.name for p in tmp_path.iterdir()} == {"export", ".export.unfinished-01234567"}


def allocated_bytes(action) -> int:
    """The most that `action` held at once beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = held = 0
    for _, nbytes in changes:
        held += nbytes
        peak = max(peak, held)
    return peak


def test_no_more_than_a_few_buffers_are_held_beside_the_model(tmp_path, monkeypatch):
    config = LlamaConfig(
        dim=128, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden=512, vocab_size=1024
    )
    model, buffer = filled(config), 16 * 1024
    monkeypatch.setattr(ranges, "CHUNK_BYTES", buffer)
    half = torch.bfloat16
    used = {
        "save_hf": allocated_bytes(lambda: save_hf(model, tmp_path / "hf", dtype=half)),
        "save_meta": allocated_bytes(lambda: save_meta(model, tmp_path / "meta", 2, dtype=half)),
        "load_hf": allocated_bytes(lambda: load_hf(model, tmp_path / "hf")),
        "load_meta": allocated_bytes(lambda: load_meta(model, tmp_path / "meta")),
        "to hf": allocated_bytes(
            lambda: convert(("meta", tmp_path / "meta"), ("hf", tmp_path / "to hf"))
        ),
        "to meta": allocated_bytes(
            lambda: convert(("hf", tmp_path / "hf"), ("meta", tmp_path / "to meta"), shards=4)
        ),
    }
    # The profiler counts a mapped file as if it were memory.
    mapped = sum(path.stat().st_size for path in (tmp_path / "meta").glob("*.pth"))
    assert mapped < used["load_meta"] < mapped + 6 * buffer, used
    assert mapped < used.pop("to hf") < mapped + 6 * buffer, used
    del used["load_meta"]
    assert max(used.values()) < 6 * buffer, used  # the largest tensor is 16 buffers, in bfloat16
