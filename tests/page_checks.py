"""What a page says of the project, held against the project: each check returns what is wrong."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pages import Command, Page
from torch.distributed.run import get_args_parser as torchrun_parser

from llama.finetune.flags import build_parser

FOREIGN_FLAGS = {  # that a page may speak of by themselves: whose they are
    "--ulimit": "docker",
    "--shm-size": "docker",
    "--signal": "Slurm",
    "--mem": "Slurm",
}
_PATH_ENDS = (".py", ".md", ".toml", ".sbatch", ".txt", ".jsonl", ".json", ".html", ".svg", "/")


def _where(page: Page, line: int, what: str) -> str:
    return f"{page.name}:{line}: {what}"


def dead_links(page: Page) -> list[str]:
    """Links to files, and to headings, that are not there."""
    problems = []
    for line, target in page.links:
        if re.match(r"\w+://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.root / page.name).parent / name if name else page.root / page.name
        if not path.exists():
            problems.append(_where(page, line, f"link to {target}: no such file"))
        elif anchor and path.suffix == ".md":
            there = Page(page.root, os.path.relpath(path, page.root))
            if anchor not in there.anchors:
                problems.append(_where(page, line, f"link to {target}: no such heading"))
    return problems


def missing_files(page: Page) -> list[str]:
    """Code spans that are paths of the project and not there."""
    problems = []
    here = {path.name for path in page.root.iterdir()}
    for line, span in page.spans:
        path, _, _ = span.partition("::")  # a test within its file
        if not re.fullmatch(r"[\w.*/-]+", path) or "/" not in path.rstrip("/"):
            continue
        top = path.split("/")[0]
        beside = (page.root / page.name).parent / path
        if top in here - {"runs"} and not (page.root / path).exists() and not beside.exists():
            pattern = list(page.root.glob(path)) if "*" in path else []
            module = (page.root / f"{path}.py").exists()
            if not pattern and not module:
                problems.append(_where(page, line, f"{path}: no such file"))
    return problems


def unknown_names(page: Page) -> list[str]:
    """Code spans such as `minifsdp.plan` or `llama.weights.load_hf(...)` that name nothing."""
    problems = []
    pattern = re.compile(r"((?:minifsdp|llama|benchmarks|torch|docs)(?:\.[A-Za-z_]\w*)+)(\(.*\))?")
    for line, span in page.spans:
        if span.endswith((".py", ".md", ".toml", ".sbatch", ".json")):
            continue
        if (match := pattern.fullmatch(span)) and not _resolves(match.group(1)):
            problems.append(_where(page, line, f"{match.group(1)}: no such module or name"))
    return problems


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


# ---- Flags ----------------------------------------------------------------------------------


def unknown_flags(page: Page) -> list[str]:
    """Flags in sentences that neither train.py nor a program that the page names has."""
    train = _train_flags()
    others = set(FOREIGN_FLAGS) | {"--help"}
    for action in torchrun_parser()._actions:
        others |= {flag.replace("_", "-") for flag in action.option_strings}
    for command in page.commands:
        others |= _flags_in_source(page.root, command)
    problems = []
    for line, span in page.spans:
        of_train = re.match(r"(python )?train\.py\b", span)
        if not of_train and not span.startswith("--"):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            if flag not in (train if of_train else train | others):
                problems.append(_where(page, line, f"{flag}: no such flag"))
    return problems


def _train_flags() -> set[str]:
    return {flag for action in build_parser()._actions for flag in action.option_strings}


def _flags_in_source(root: Path, command: Command) -> set[str]:
    """The flags in the source of what a command runs, or all its words if that is no Python."""
    words = command.text.split()
    if words[0] not in ("python", "python3"):
        return {word.partition("=")[0] for word in words if word.startswith("--")}
    path = root / (words[2].replace(".", "/") if words[1] == "-m" else words[1])
    files = list(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if "train.py" in words:
        return set()
    text = "".join(file.read_text() for file in files if file.exists())
    return set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", text))


# ---- Commands that are not run --------------------------------------------------------------


def wrong_in_unrun(page: Page, commands: list[Command]) -> list[str]:
    """What `pytest` and `pip` commands name that is not there: files, markers, extras."""
    project = tomllib.loads((page.root / "pyproject.toml").read_text())
    markers = {m.partition(":")[0] for m in project["tool"]["pytest"]["ini_options"]["markers"]}
    extras = set(project["project"]["optional-dependencies"])
    problems = []
    for command in commands:
        words = shlex.split(command.text)
        for word, before in zip(words[1:], words, strict=False):
            path = word.partition("::")[0]
            if before == "-m" and words[0] == "pytest":
                unknown = set(re.findall(r"\w+", word)) - markers - {"not", "or", "and"}
                problems += [f"{command}: no marker {name}" for name in sorted(unknown)]
            elif "/" in path or path.endswith((".py", ".txt")):
                if not (page.root / path).exists():
                    problems.append(f"{command}: {path}: no such file")
            elif match := re.fullmatch(r"\.\[(.+)\]", word):
                unknown = set(match.group(1).split(",")) - extras
                problems += [f"{command}: no extra {name}" for name in sorted(unknown)]
    return problems


# ---- The tree -------------------------------------------------------------------------------


def tree_of(page: Page) -> dict[str, int] | None:
    """Paths named by the page's tree of files, each with its line; None if it has none.

    A line is names with commas between them and what they are; a line that is indented as far as
    those words goes on with them.
    """
    block = next(
        (b for b in page.blocks if b.language in ("", "text") and "\nminifsdp/ " in b.text), None
    )
    if block is None:
        return None
    named: dict[str, int] = {}
    parents: list[tuple[int, str]] = []  # (indent, folder) of those that this line is in
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        line = re.sub(r"[│├└─|]", " ", line)
        match = re.match(r"( *)([\w./-]+(?:, ?[\w./-]+)*)", line)
        if not match or len(match.group(1)) >= 12:  # goes on with the line above
            continue
        indent, names = len(match.group(1)), match.group(2)
        while parents and parents[-1][0] >= indent:
            parents.pop()
        folder = parents[-1][1] if parents else ""
        for name in re.split(r", ?", names):
            path = folder + name
            named[path] = number
            if name.endswith("/"):
                parents.append((indent, path))
    return named


def wrong_in_tree(page: Page) -> list[str]:
    """What the tree names and is not there, and modules of either package that it leaves out."""
    named = tree_of(page)
    if named is None:
        return [_where(page, 1, "no tree of files: a block with a line that begins 'minifsdp/ '")]
    problems, seen = [], set()
    for name, line in named.items():
        path = page.root / name.rstrip("/")
        found = [path] if path.exists() else list(path.parent.glob(f"{path.name}.*"))
        if not found:
            problems.append(_where(page, line, f"{name} is not there"))
        seen |= {p.resolve() for p in found}
    for package in ("minifsdp", "llama"):
        for path in _modules(page.root / package):
            if path.resolve() not in seen:
                relative = path.relative_to(page.root)
                problems.append(_where(page, 1, f"the tree leaves out {relative}"))
    for path in sorted(page.root.iterdir()):
        if path.is_dir() and any(path.glob("*.py")) and path.resolve() not in seen:
            problems.append(_where(page, 1, f"the tree leaves out {path.name}/"))
    return problems


def _modules(package: Path) -> Iterator[Path]:
    for path in sorted(package.iterdir()):
        is_package = path.is_dir() and any(path.glob("*.py"))
        if is_package or (path.suffix == ".py" and not path.name.startswith("__")):
            yield path


# ---- Tables that a command prints -----------------------------------------------------------


def tables(text: str) -> dict[str, str]:
    """Markdown tables by their first line."""
    found = re.findall(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n?)*", text, re.MULTILINE)
    return {table.partition("\n")[0]: table.strip() for table in found}


def stale_tables(page: Page, printed: str) -> list[str]:
    """Tables of the page that differ from those which `printed` has under the same first line."""
    ours = tables(page.text)
    return [
        _where(page, page.line_of(page.text.index(head)), "not the table that its command prints")
        for head, table in tables(printed).items()
        if head in ours and ours[head] != table
    ]
