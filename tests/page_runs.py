"""The commands and the code of a page, run in a copy of the project.

[Note: what is not run as it stands]
A machine for tests lacks what some commands need, and time: `SUBSTITUTIONS` says what is put in its
place, `page_materials` which files are made where a command names them, `LONG` what only `pytest -m
slow` does in full, `NOT_RUN` what is not run. What none of them knows is run as it stands.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from page_materials import MATERIALS
from pages import PLAIN, Command, Page
from torch.distributed.run import get_args_parser as torchrun_parser
from warm_python import Done, WarmPython

ROOT = Path(__file__).parents[1]
SAID = "Hello\n"  # to what reads a pipe: a turn of a chat


class Substitution(NamedTuple):
    """What is put in place of what a command holds, and why."""

    pattern: str
    instead: str
    why: str
    shortens: bool = False  # so it is left out where there is time


_TRAINS = r"(?=.*\btrain\.py\b)(?!.*(?:train\.py --?h|--(?:chat|plan|eval-only|show-sample)\b))"
SUBSTITUTIONS = [
    Substitution(r"^python3?\b", "python", "the interpreter of the tests"),
    Substitution(
        r"^sbatch (?:--\S+ \S+ )*(docs/slurm/\S+) (\S+)",
        r"torchrun --standalone --nproc-per-node 2 train.py --out \2",
        "no Slurm here: what the script launches",
    ),
    Substitution(r" --nnodes \S+", " --standalone", "one machine"),
    Substitution(r" --rdzv-\w+ \S+", "", "one machine"),
    Substitution(r"(--nproc-per-node[ =])(?!1\b)\d+", r"\g<1>2", "two cores"),
    Substitution(r"(?<=\s)/scratch/", "scratch/", "no such disk"),
    Substitution(
        rf"^{_TRAINS}(?=.*train\.py --)(?!.* --(?:data|model))(.*)",
        r"\1 --data chats.jsonl --tokenizer tokenizer.model",
        "150,000 made-up dialogs take seconds to make; the job without flags does",
        True,
    ),
    Substitution(rf"^{_TRAINS}(.*) --trace \S+", r"\1 --trace 1", "a step is traced", True),
    Substitution(rf"^{_TRAINS}(.*)", r"\1 --steps 3", "fewer steps; the last --steps counts", True),
    Substitution(rf"^{_TRAINS}(?!.* --seq-len)(.*)", r"\1 --seq-len 64", "short rows", True),
    Substitution(
        rf"^{_TRAINS}(?!.* --(?:model|dim|preset) )(.*)",
        r"\1 --dim 32 --layers 2 --heads 4 --ffn 64 --batch-size 8",
        "a smaller model and batch",
        True,
    ),
    Substitution(rf"^{_TRAINS}(?!.*--resume)(.*)", r"\1 --overwrite", "commands are alternatives"),
    Substitution(
        r"(\bbenchmarks\.trace_cost\b.*)", r"\1 --work tiny --rounds 1", "a tiny model", True
    ),
    Substitution(r"^(.*--plan\b.*--preset (?!tiny).*)", r"\1 --layers 2", "two blocks", True),
]

# Begun, to see that it is there and takes these flags; run in full by `pytest -m slow`.
LONG = [
    (r"\bbenchmarks\.step\b(?!.*--(?:summary|table|list)\b)", "measures; minutes"),
    (r"\bdocs\.make\b", "runs all that the guide shows; tests/test_guide.py"),
    (r"\bdocs/ladder\b", "launches ranks of its own; tests/test_ladder.py"),
    (r"\bminifsdp\.verify\b", "launches ranks of its own; tests/test_verify_cli.py"),
    (r"\bbenchmarks\.plan_\w+", "plans of 70B models, runs of many settings; minutes"),
    (r"\bbenchmarks\.wide_step\b", "two blocks of 70B; minutes and 60 GB of disk"),
    (r"\bparity_matrix\.py\b", "49 cells; a minute on two idle cores"),
    (r"^sbatch\b", "the launch above it once more; tests/test_two_hosts.py runs the script"),
]
# Likewise begun, but never run: (pattern, why).
NEEDS_ROOT = [(r"\bbenchmarks\.slow_network\b", "needs root; tests/test_bench_slow_network.py")]
NOT_RUN = [(r"^pip\b", "installing"), (r"^pytest\b", "pytest itself")]


def reason_not_run(text: str, among: list[tuple[str, str]]) -> str | None:
    """Why the command is among those; None if it is not."""
    return next((why for pattern, why in among if re.search(pattern, text)), None)


def substituted(text: str, in_full: bool) -> tuple[str, list[Substitution]]:
    """The command as it is run here, and what was put in place of what."""
    used = []
    for substitution in SUBSTITUTIONS:
        if substitution.shortens and in_full:
            continue
        changed = re.sub(substitution.pattern, substitution.instead, text)
        if changed != text:
            used.append(substitution)
        text = changed
    return text, used


# ---- Running --------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a command."""

    command: Command
    ran: str  # as it was run
    done: Done
    used: list[Substitution]
    only_flags: bool

    def __str__(self) -> str:
        lines = [f"{self.command}", f"  as: {self.ran}"]
        lines += [f"      {sub.why}: {sub.pattern}  ->  {sub.instead}" for sub in self.used]
        if self.only_flags:
            lines.append("      only its flags were read")
        return "\n".join([*lines, f"  exit code {self.done.code}", self.done.output[-3000:]])


class Workspace:
    """A copy of the project in which the commands of one page are run, in their order."""

    def __init__(self, page: Page, folder: Path, warm: WarmPython, in_full: bool = False) -> None:
        self.page, self.folder, self.warm, self.in_full = page, folder, warm, in_full
        left_out = shutil.ignore_patterns(".*", "runs", "*.egg-info", "shared")
        shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)
        for script in page.scripts:
            (folder / script.name).write_text(script.text)
        self._outcomes: dict[int, Outcome] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def outcome(self, index: int) -> Outcome:
        """Of the page's command `index`, once those before it have run."""
        for each, command in enumerate(self.page.commands[: index + 1]):
            if each not in self._outcomes and reason_not_run(command.text, NOT_RUN) is None:
                self._outcomes[each] = self._begin(command)
        return self._outcomes[index]

    def _begin(self, command: Command) -> Outcome:
        begun = self.is_begun(command)
        text, used = substituted(command.text, self.in_full)
        text = text.replace("runs/NAME", self._last_run())
        if command.spoken and re.fullmatch(r"python -m [\w.]+", text) and not begun:
            text, begun = f"{text} --help", True  # a tool by its name, without what it needs
        made = self._make(text + " " + self._configuration(text))
        try:
            done = self._run(text, command.environment, self._is_real(command), begun)
        finally:
            for path in made:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return Outcome(command, text, done, used, begun)

    def is_begun(self, command: Command) -> bool:
        """Whether the command is only begun, to see that its flags are read."""
        if reason_not_run(command.text, NEEDS_ROOT):
            return True
        return not self.in_full and reason_not_run(command.text, LONG) is not None

    def _is_real(self, command: Command) -> bool:
        """Whether torchrun itself is started: by the page's first command, and for its scripts."""
        words = command.text.split()
        first = next(c for c in self.page.commands if not reason_not_run(c.text, NOT_RUN))
        named = any(script.name in words for script in self.page.scripts)
        return self.in_full or named or (command == first and words[0] == "torchrun")

    def _configuration(self, text: str) -> str:
        """What a file that --config names says: it names files too."""
        named = re.search(r"--config (\S+\.toml)", text)
        return (self.folder / named.group(1)).read_text() if named else ""

    def _last_run(self) -> str:
        """The folder that `runs/NAME` stands for; one that any run has made, the newest."""
        made = sorted(self.folder.glob("runs/*/config.json"), key=lambda p: p.stat().st_mtime)
        return f"runs/{made[-1].parent.name}" if made else "runs/NAME"

    def _make(self, text: str) -> list[Path]:
        """Make the files and folders that the command names and that are not there."""
        made = []
        for pattern, make in MATERIALS:
            for name in re.findall(pattern, text):
                path = self.folder / name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    make(path)
                    made.append(path)
        return made

    def _run(
        self, text: str, environment: dict[str, str], real: bool = False, only_flags: bool = False
    ) -> Done:
        words = [w for word in shlex.split(text) for w in self._expanded(word)]
        environment = environment | self.environment
        self._begin_anew(words)
        ranks, python = 0, words[1:]
        if words[0] in PLAIN:
            return self._start(words, environment)
        if words[0] == "torchrun":
            given = self._torchrun(words[1:])
            if isinstance(given, Done):
                return given
            ranks, python = given
        elif words[0] != "python":
            return Done(127, f"{words[0]}: a test cannot run this: give it a substitution")
        if real and not only_flags:
            launcher = ["-m", "torch.distributed.run"] if ranks else []
            return self._start([sys.executable, *launcher, *words[1:]], environment)
        return self.warm.run(
            python,
            self.folder,
            ranks=ranks,
            stdin=SAID,
            environment=environment,
            timeout_seconds=self._limit_seconds,
            only_flags=only_flags,
        )

    @property
    def _limit_seconds(self) -> float:
        return 1800 if self.in_full else 60

    def _start(self, words: list[str], environment: dict[str, str]) -> Done:
        """Run the words as a process of its own."""
        ran = subprocess.run(
            words,
            cwd=self.folder,
            env=os.environ | environment,
            input=SAID,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._limit_seconds,
        )
        return Done(ran.returncode, ran.stdout)

    def _torchrun(self, words: list[str]) -> tuple[int, list[str]] | Done:
        """The ranks and what they run; or how torchrun ended, if that is the flags' doing."""
        mentioned = not any(word.endswith(".py") or word in ("-m", "--help") for word in words)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                args = torchrun_parser().parse_args([*words, "train.py"] if mentioned else words)
        except SystemExit as ending:
            return Done(int(ending.code or 0), said.getvalue())
        if mentioned:
            return Done(0, "flags of torchrun, spoken of")
        module = ["-m"] if args.module else []
        return int(args.nproc_per_node), [*module, args.training_script, *args.training_script_args]

    def _expanded(self, word: str) -> list[str]:
        """What the shell makes of a pattern of file names."""
        if not re.search(r"[*?\[]", word) or " " in word:
            return [word]
        return sorted(glob.glob(word, root_dir=self.folder)) or [word]

    def _begin_anew(self, words: list[str]) -> None:
        """Launch lines of a page are alternatives: `--resume auto` finds no run of the one before,
        and what converts finds no file of an earlier command."""
        if "--resume" in words and "auto" in words and "--out" in words:
            out = self.folder / words[words.index("--out") + 1]
            shutil.rmtree(out, ignore_errors=True)
        for parent in {Path(w).parent for w in words if w.startswith("scratch/")}:
            (self.folder / parent).mkdir(parents=True, exist_ok=True)

    def run_script(self, name: str, ranks: int = 2) -> Done:
        """Run a program of the page under what stands for torchrun."""
        return self._run(f"torchrun --standalone --nproc-per-node {ranks} {name}", {})

    def read_toml(self, name: str, text: str) -> Done:
        """Show two examples by the flags in `text`: train.py reads them and the files they name."""
        (self.folder / name).write_text(text)
        flags = "" if re.search(r"^data\b", text, re.MULTILINE) else " --data chats.jsonl"
        if not re.search(r"^(tokenizer|model)\b", text, re.MULTILINE):
            flags += " --tokenizer tokenizer.model"
        command = f"python train.py --config {name}{flags} --show-sample 2"
        return self._begin(Command(self.page.name, 0, command, {}, spoken=False)).done
