"""The pages that people read first do what they say: README.md and the guides beside it.

Every command and every block of Python and TOML is run, in a copy of the project, in the order of
the page; a page that gains one has it tested with no change here. What a test machine cannot do is
substituted or left out as `page_runs` lists it; each test prints what it ran and how. Links, paths,
names, flags and the tree of files are held against the project.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_python
from page_checks import (
    dead_links,
    missing_files,
    stale_tables,
    tables,
    unknown_flags,
    unknown_names,
    wrong_in_tree,
    wrong_in_unrun,
)
from page_runs import LONG, NEEDS_ROOT, NOT_RUN, Workspace, reason_not_run
from pages import Page

ROOT = Path(__file__).parents[1]
# The guide's and the ladder's pages, in folders, are made by what they show: see their tests.
RUN = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
PAGES = {name: Page(ROOT, name) for name in RUN}
EVERY_PAGE = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
COMMANDS = [
    (name, index)
    for name, page in PAGES.items()
    for index, command in enumerate(page.commands)
    if not reason_not_run(command.text, NOT_RUN)
]


def _called(value: object) -> str:
    return re.sub(r"[^\w.-]+", " ", str(value))[:70]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Workspace]:
    """`workspace(page, in_full=False)`: one copy of the project a page."""
    made: dict[tuple[str, bool], Workspace] = {}

    def of(name: str, in_full: bool = False) -> Workspace:
        key = name, in_full
        if key not in made:
            folder = tmp_path_factory.mktemp("project")
            made[key] = Workspace(PAGES[name], folder, warm_python.shared(), in_full)
        return made[key]

    return of


# ---- What the pages have people do ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "index"), COMMANDS, ids=[_called(PAGES[n].commands[i]) for n, i in COMMANDS]
)
def test_a_command_of_the_page_does_what_it_should(
    name: str, index: int, workspace: Callable[..., Workspace]
) -> None:
    outcome = workspace(name).outcome(index)
    print(outcome)
    assert outcome.done.code == 0, str(outcome)
    if not any(sub.shortens for sub in outcome.used):
        assert stale_tables(PAGES[name], outcome.done.output) == []


IN_FULL = [
    (name, index)
    for name, index in COMMANDS
    if not reason_not_run(PAGES[name].commands[index].text, NEEDS_ROOT)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "index"), IN_FULL, ids=[_called(PAGES[n].commands[i]) for n, i in IN_FULL]
)
def test_a_command_of_the_page_does_it_in_full(
    name: str, index: int, workspace: Callable[..., Workspace]
) -> None:
    outcome = workspace(name, in_full=True).outcome(index)
    print(outcome)
    assert outcome.done.code == 0, str(outcome)
    if reason_not_run(outcome.ran, LONG[:1]) is None:  # what measures prints what it measured
        assert stale_tables(PAGES[name], outcome.done.output) == []


SCRIPTS = [
    (name, script.name)
    for name, page in PAGES.items()
    for script in page.scripts
    if not any(script.name in command.text.split() for command in page.commands)
    and not re.search(r"^# (before|after), ", script.text, re.MULTILINE)  # see test_from_fsdp.py
]


@pytest.mark.parametrize(("name", "script"), SCRIPTS)
def test_code_of_the_page_runs(name: str, script: str, workspace: Callable[..., Workspace]) -> None:
    done = workspace(name).run_script(script)
    assert done.code == 0, done.output


TOML = [
    (name, block.line, block.text)
    for name, page in PAGES.items()
    for block in page.blocks
    if block.language == "toml"
]


@pytest.mark.parametrize(("name", "line", "text"), TOML, ids=[f"{n}:{i}" for n, i, _ in TOML])
def test_train_py_takes_the_configuration_that_the_page_shows(
    name: str, line: int, text: str, workspace: Callable[..., Workspace]
) -> None:
    done = workspace(name).read_toml(f"lines_{line}.toml", text)
    assert done.code == 0, done.output


def test_what_is_not_run_names_only_what_is_there() -> None:
    for page in PAGES.values():
        left = [c for c in page.commands if reason_not_run(c.text, NOT_RUN)]
        for command in left:
            print(f"not run, {reason_not_run(command.text, NOT_RUN)}: {command}")
        assert wrong_in_unrun(page, left) == []


FILES = [
    (name, span) for name, page in PAGES.items() for _, span in page.spans if "runs/NAME/" in span
]


@pytest.mark.parametrize(("name", "span"), FILES)
def test_runs_leave_the_files_that_the_page_names(
    name: str, span: str, workspace: Callable[..., Workspace]
) -> None:
    of = workspace(name)
    of.outcome(max(index for other, index in COMMANDS if other == name))
    path = next(word for word in span.split() if word.startswith("runs/NAME/"))
    assert list(of.folder.glob(path.replace("NAME", "*"))), path


def test_figures_are_those_that_a_command_of_the_page_prints(
    workspace: Callable[..., Workspace],
) -> None:
    name, index = next(
        (name, index)
        for name, index in COMMANDS
        if "benchmarks.step --summary" in PAGES[name].commands[index].text
    )
    printed = tables(workspace(name).outcome(index).done.output)
    shown = {head: table for page in PAGES.values() for head, table in tables(page.text).items()}
    assert len(printed) >= 2 and printed.items() <= shown.items()


# ---- What the pages say is there ------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_PAGE)
@pytest.mark.parametrize("check", [dead_links, missing_files, unknown_names, unknown_flags])
def test_what_a_page_names_is_there(name: str, check: Callable[[Page], list[str]]) -> None:
    assert check(Page(ROOT, name)) == []


def test_the_tree_of_files_names_every_module_and_nothing_else() -> None:
    assert wrong_in_tree(Page(ROOT, "README.md")) == []


# ---- What breaks is noticed; more of it in test_pages.py ------------------------------------


def test_commands_and_code_that_fail_are_noticed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = """
```
python train.py --plan --no-such-flag
python -m llama.generated
torchrun --standalone --nproc-per-node 2 gone.py
torchrun --no-such-flag train.py
python train.py --help
```

```python
import os
assert os.environ["RANK"] == "0", "rank 1 fails"
```
"""
    (tmp_path / "README.md").write_text(text)
    broken = Workspace(
        Page(tmp_path, "README.md"), tmp_path_factory.mktemp("project"), warm_python.shared()
    )
    done = [broken.outcome(index).done for index in range(5)]
    assert [ended.code != 0 for ended in done] == [True, True, True, True, False]
    assert "train.py: error: unrecognized arguments: --no-such-flag" in done[0].output
    assert "No module named llama.generated" in done[1].output
    ended = broken.run_script(broken.page.scripts[0].name)
    assert ended.code == 1
    assert 'lines_11.py", line 12, in <module>' in ended.output and "rank 1 fails" in ended.output
    ended = broken.read_toml("x.toml", 'data = "chats.jsonl"\nsteeps = 3\n')
    assert ended.code == 2 and "steeps: there is no such flag: did you mean steps?" in ended.output
    assert not (ROOT / "x.toml").exists()
