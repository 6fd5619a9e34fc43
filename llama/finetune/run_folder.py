"""A run's folder: how it is known, when it may be written to, and where the run in it stands."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama.finetune.metrics import read_metrics
from llama.finetune.processes import launch, restarts

TRACES = ("trace.html", "trace.json")
# What `--overwrite` deletes. `config.json`, by which a run's folder is known, is replaced instead.
PARTS = (
    "tensorboard",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    "best",
    "export",
    "adapter",
    *TRACES,
)


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run's: its `config.json` holds flags and a model."""
    content = read_object(folder / "config.json")
    return all(isinstance(content.get(key), dict) for key in ("arguments", "model"))


def is_restart(folder: Path) -> bool:
    """Whether torchrun starts the processes of the run in `folder` once more, having begun it."""
    begun_by = read_object(folder / "config.json").get("launch")
    return restarts() > 0 and is_run(folder) and begun_by == launch()


def recorded_flags(folder: Path) -> dict[str, Any]:
    """The flags of the run in `folder`; ValueError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--resume: {path} is missing, so there is no run to continue")
    if not is_run(folder):
        raise ValueError(f"--resume: {path} is damaged, or no run's: it holds no flags of a run")
    return read_object(path)["arguments"]


def check_apart(out: Path, model: str | None, inputs: Sequence[str]) -> None:
    """ValueError if the run would write among what it reads, or delete it.

    `inputs` are all paths that it reads, `model` among them.
    """
    folder = out.resolve()
    if model and Path(model).resolve() in (folder, *folder.parents):
        raise ValueError(f"run folder {out} is --model {model}, or inside it: choose another --out")
    for path in inputs:
        if folder in Path(path).resolve().parents:
            raise ValueError(f"{path}, which this run reads, is in run folder {out}: move one")


def check_free(out: Path, overwrite: bool) -> None:
    """ValueError if a new run may not use the folder `out`."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"run folder {out} is a file: choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_run(out):
        raise ValueError(
            f"{out} holds something else than a run (config.json has no flags of one): "
            "choose another --out"
        )
    if not overwrite:
        raise ValueError(
            f"run folder {out} exists: continue that run with --resume, replace it with "
            "--overwrite, or choose another --out or --name"
        )


def check_resumable(out: Path, done: int | None, steps: int, stop_at: int | None) -> None:
    """ValueError unless the run in `out` can go on: it has a checkpoint, and work up to `steps`.

    `done` counts the steps up to its last checkpoint; None where it has none.
    """
    if done is None:
        raise ValueError(
            f"{out} was stopped before its first checkpoint: start it again with --overwrite, and "
            "save more often with --save-every STEPS"
        )
    if done > steps:
        raise ValueError(
            f"{out} has done {done} steps, more than the {steps} of this run: give a larger "
            "--steps or --epochs"
        )
    if is_finished(out, done, steps) and not is_restart(out):  # a rank may die when all is done
        raise ValueError(
            f"{out} is finished ({done} of {steps} steps): give a larger --steps or --epochs to "
            "train on"
        )
    if stop_at and stop_at <= done < steps:
        raise ValueError(f"--stop-at {stop_at}: {out} has done {done} steps already: raise it")
    read_metrics(out / "metrics.jsonl")  # refused here, if damaged, before anything is changed


def check_room(out: Path, needed_bytes: int) -> None:
    """ValueError, with the figures, if `out` has no room for what a run writes there.

    What is there already of an earlier run counts as free, as it is replaced.
    """
    parts = [out / part for part in PARTS]
    files = [path for part in parts for path in (part, *part.rglob("*")) if path.is_file()]
    existing = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in files)
    if free_bytes < needed_bytes:
        raise ValueError(
            f"run folder {out} needs {needed_bytes:,} bytes for checkpoints and export, and "
            f"{free_bytes:,} are free there: make room, choose another --out, or keep fewer "
            "checkpoints with --keep-last"
        )


def is_finished(out: Path, done: int | None, steps: int) -> bool:
    """Whether the run in `out`, saved last after `done` steps, has nothing left to do."""
    return done == steps and is_summarised(out, steps) and (out / "export").is_dir()


def is_summarised(out: Path, steps: int) -> bool:
    """Whether `out` has the summary of a run of `steps` steps, not one of before it trained on."""
    return read_object(out / "summary.json").get("steps") == steps


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if it is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
