"""What a run writes down of itself: metrics.jsonl, TensorBoard, the summary on the screen."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llama.finetune.memory import PeakMemory
from llama.finetune.metrics import Metrics, describe, read_metrics

STEP = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens": 300, "seconds": 1.5}


class Board:
    """Stands in for torch's SummaryWriter."""

    made: list[Board]

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[str, Any, int]] = []
        self.flushed, self.closed = 0, False
        Board.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.scalars)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Board.made = []
    return Board.made


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # ImportError


def test_numbers_go_to_tensorboard_at_once_by_group(boards, tmp_path: Path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(0, eval_loss=3.0, eval_perplexity=20.1)
    metrics.write(1, **STEP, skipped="loss is not finite")
    metrics.write(1, prompt="2 + 2", answer="4", best=True)
    (board,) = boards
    assert (board.log_dir, board.purge_step) == (str(tmp_path / "tensorboard"), None)
    assert board.scalars == [
        ("eval/loss", 3.0, 0),
        ("eval/perplexity", 20.1, 0),
        ("train/loss", 2.0, 1),
        ("train/lr", 1e-3, 1),
        ("train/grad_norm", 0.5, 1),
        ("train/tokens", 300, 1),
        ("train/seconds", 1.5, 1),
        ("train/tokens_per_second", 200.0, 1),
    ]
    assert board.flushed == len(board.scalars)
    metrics.close()
    assert board.closed


def test_a_resumed_run_shows_tensorboard_what_its_metrics_hold(boards, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step))
        metrics.write(step, eval_loss=float(step))
    Metrics(path, step=2).write(2, eval_loss=2.0)
    first, second = boards
    assert second.purge_step == 2  # hides steps 2 and 3 of the first
    shown = [s for s in first.scalars if s[2] < 2] + second.scalars
    assert sorted(shown) == sorted(
        (f"{'train' if 'loss' in line else 'eval'}/loss", float(line["step"]), line["step"])
        for line in read_metrics(path)
    )
    assert len(shown) == 4


def test_without_tensorboard_there_is_no_folder_and_no_word(no_tensorboard, tmp_path, capfd):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(1, **STEP)
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capfd.readouterr() == ("", "")


def test_metrics_are_strict_json_whatever_a_step_gave(no_tensorboard, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write(1, loss=math.nan, grad_norm=math.inf, lr=1e-3, skipped="loss is not finite")
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 1e-3)
    Metrics(path, step=1)  # a skipped step is a step
    assert read_metrics(path) == [line]


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"loss": 2.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: damaged, not a JSON object"):
        read_metrics(path)


def test_the_screen_shows_what_was_measured_with_bytes_in_mib():
    summary = {"steps": 3, "mfu": None, "by_kind": {}, "peak_bytes": 3 * 2**20, "lines_refused": 0}
    assert list(describe(summary)) == [
        "steps: 3",
        "peak_bytes: 3145728 (3.0 MiB)",
        "lines_refused: 0",
    ]


def test_peak_memory_is_what_was_held_and_what_lived_at_once():
    held, memory = torch.zeros(1000), PeakMemory(torch.device("cpu"))
    memory.start([held, held[:10]])  # one storage
    for _ in range(3):
        temporary = torch.zeros(50_000)
        del temporary
    both = [torch.zeros(20_000), torch.zeros(20_000)]
    memory.close()
    del both
    assert memory.peak_bytes == 4 * (1000 + 50_000)
