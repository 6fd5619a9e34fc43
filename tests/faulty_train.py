"""train.py in a process that comes to harm: what tests/test_faults.py starts.

FAULTS is a JSON list with a fault for each start by torchrun: the rank that meets it, its phase and
its step (and for random moments, the delay in seconds); a missing one is no fault. A rank that
kills itself first adds a line to FAULT_LOG: the phase that it was in, its rank and the step.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)

from torch.distributed.checkpoint import filesystem  # noqa: E402

from minifsdp.checkpoint import saving  # noqa: E402
from minifsdp.checkpoint.metadata import read_metadata  # noqa: E402

RANK = int(os.environ.get("RANK", 0))


class Fault:
    """Follows what this rank does, and strikes where it is told to."""

    def __init__(self) -> None:
        faults = json.loads(os.environ["FAULTS"])
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        about = faults[attempt] if attempt < len(faults) else {"rank": -1}
        mine = about["rank"] == RANK
        self.wanted = about["phase"] if mine else ""
        self.step = about["step"] if mine else -1
        self.delay = about.get("delay", 0.0)
        self.phase, self.saved_step, self.items = "training", 0, 0

    def reach(self, phase: str) -> None:
        """Note the phase, and die in it if that is wanted."""
        self.phase = phase
        if phase == self.wanted and self.saved_step == self.step:
            self.die()

    def die(self) -> None:
        with open(os.environ["FAULT_LOG"], "a") as log:
            log.write(f"{self.phase},{RANK},{max(self.saved_step, 0)}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    # ---- While saving -----------------------------------------------------------------------

    def write(self, job: Any, original: Any = saving._write) -> None:
        self.saved_step, self.items = job.step, 0
        self.phase = "writing"
        try:
            original(job)
        finally:
            self.phase = "training"

    def write_item(self, *args: Any, original: Any = filesystem._write_item) -> Any:
        self.items += 1
        if self.items == 5:  # some are in the file, or in its buffer
            self.reach("writing")
        return original(*args)

    def digest(self, path: Path, original: Any = saving.digest) -> Any:
        self.reach("written")
        return original(path)

    def write_manifest(self, *args: Any, original: Any = saving.write_manifest, **about: Any):
        original(*args, **about)
        self.reach("before the rename")

    def rename(self, source: Any, target: Any, original: Any = os.rename) -> None:
        original(source, target)
        if not Path(target).name.startswith("step-"):
            return
        self.reach("after the rename")
        if self.wanted in ("torn", "flipped") and self.saved_step == self.step:
            # What a power cut may leave of files that were not synced, or a bad disk.
            victim = Path(target) / "__1_0.distcp"
            content = bytearray(victim.read_bytes())
            content[middle_of_largest(Path(target), victim.name)] ^= 1
            victim.write_bytes(content if self.wanted == "flipped" else content[:-100])
            self.phase = f"after the rename ({self.wanted})"
            self.die()

    def rmtree(self, path: Any, original: Any = shutil.rmtree, **about: Any) -> None:
        if Path(path).name.startswith(".deleted-"):
            next(Path(path).iterdir()).unlink()
            self.reach("deleting an older one")
        original(path, **about)

    # ---- While training ---------------------------------------------------------------------

    def train_step(self, original: Any) -> Any:
        def step_then_maybe_die(run: Any, step: int, wishes: Any) -> Any:
            if step + 1 == self.step and self.wanted in ("training", "random"):
                threading.Timer(self.delay, self.die).start()
            if step + 1 == self.step and self.wanted == "disk full":
                fill(run.job.out)
            return original(run, step, wishes)

        return step_then_maybe_die


def middle_of_largest(path: Path, name: str) -> int:
    """Where in a file of checkpoint `path` the middle of its largest tensor is: no zip header."""
    files = {file.name for file in path.iterdir()}
    places = read_metadata(path, files).storage_data.values()
    largest = max((p for p in places if p.relative_path == name), key=lambda p: p.length)
    return largest.offset + largest.length // 2


def fill(folder: Path) -> None:
    """Leave no room on the disk of `folder`."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def main() -> None:
    fault = Fault()
    saving._write, saving.digest = fault.write, fault.digest
    saving.write_manifest = fault.write_manifest
    filesystem._write_item = fault.write_item
    os.rename, shutil.rmtree = fault.rename, fault.rmtree
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    train.train_step = fault.train_step(train.train_step)
    train.main()


if __name__ == "__main__":
    main()
