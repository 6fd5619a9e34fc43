"""That pages are read right, and that what breaks in one is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from page_checks import (
    dead_links,
    missing_files,
    stale_tables,
    unknown_flags,
    unknown_names,
    wrong_in_tree,
    wrong_in_unrun,
)
from page_materials import MATERIALS
from page_runs import substituted
from pages import Page

ROOT = Path(__file__).parents[1]


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Page]:
    """`page(text)`: README.md with that text, in the project as it is."""
    for path in ROOT.iterdir():
        if path.name != "README.md":
            (tmp_path / path.name).symlink_to(path)

    def made(text: str) -> Page:
        (tmp_path / "README.md").write_text(text, encoding="utf-8")
        return Page(tmp_path, "README.md")

    return made


# ---- Reading --------------------------------------------------------------------------------

SHOWN = """\
# A page

Run `python -m llama.generate
--help` or `pytest -m slow`; `--steps` is a flag, ``a ` b`` a span.

1. First

   ```
   # not a command
   export A=1 B=two
   pip install x && C=3 torchrun --standalone \\
     train.py --steps 2  # a remark
   ```

```console
$ python train.py
step 1
```

```
minifsdp/   a tree
```

```python
model = 1
dist.init_process_group("gloo")
other = make(
    2,
)
clip(model)
dist.destroy_process_group()
```

Save it as `one.py`.

```python
other = 3  # without clip
```

```python
print(model)
```
"""


def test_commands_are_found_in_blocks_and_in_sentences_in_the_order_of_the_page(page) -> None:
    exported = {"A": "1", "B": "two"}
    assert [(c.line, c.text, c.environment, c.spoken) for c in page(SHOWN).commands] == [
        (3, "python -m llama.generate --help", {}, True),
        (4, "pytest -m slow", {}, True),
        (11, "pip install x", exported, False),
        (11, "torchrun --standalone train.py --steps 2", exported | {"C": "3"}, False),
        (16, "python train.py", {}, False),
    ]


def test_code_is_put_where_it_belongs_in_the_program_before_it(page) -> None:
    first, second, third = page(SHOWN).scripts
    assert first.name == "one.py" and first.line == 25
    lines = [line for line in second.text.splitlines() if line]
    assert lines == [
        "model = 1",
        'dist.init_process_group("gloo")',
        "other = 3  # without clip",
        "pass",
        "dist.destroy_process_group()",
    ]
    assert third.text.splitlines()[-2:] == ["print(model)", "dist.destroy_process_group()"]


@pytest.mark.parametrize("line", ["pyhton train.py", "./run.sh --steps 2"])
def test_what_may_be_a_command_and_is_not_known_is_refused(page, line: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md:3: commands of an unknown program\?"):
        print(page(f"\n```\n{line}\n```\n").commands)


@pytest.mark.parametrize(
    ("text", "ran"),
    [
        ("python -m minifsdp.verify --against fsdp2", "python -m minifsdp.verify --against fsdp2"),
        ("python docs/ladder/rung2.py", "python docs/ladder/rung2.py"),
        (
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id x train.py --steps 500 --model m",
            "torchrun --standalone --nproc-per-node 2 train.py --steps 500 "
            "--model m --steps 3 --seq-len 64 --overwrite",
        ),
        (
            "sbatch --nodes 4 docs/slurm/x.sbatch /scratch/70b --config c --model m",
            "torchrun --standalone --nproc-per-node 2 train.py --out scratch/70b --config c "
            "--model m --steps 3 --seq-len 64 --overwrite",
        ),
        ("python train.py --chat --out runs/tasks", "python train.py --chat --out runs/tasks"),
        (
            "python train.py --model m --trace 3",
            "python train.py --model m --trace 1 --steps 3 --seq-len 64 --overwrite",
        ),
    ],
)
def test_only_what_a_test_machine_lacks_is_substituted(text: str, ran: str) -> None:
    assert substituted(text, in_full=False)[0] == ran
    assert "--steps 3" not in substituted(text, in_full=True)[0]


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in MATERIALS])
def test_each_kind_of_file_that_is_made_is_named_somewhere(pattern: str) -> None:
    pages = [path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    assert any(re.search(pattern, text) for text in pages)


# ---- What breaks is noticed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "text", "problem"),
    [
        (dead_links, "see [it](docs/gone.md)", "docs/gone.md: no such file"),
        (dead_links, "# Here\n\n[it](#there)", "#there: no such heading"),
        (dead_links, "[it](docs/train-70b.md#slum)", "docs/train-70b.md#slum: no such heading"),
        (missing_files, "`tests/test_gone.py`", "tests/test_gone.py: no such file"),
        (missing_files, "`llama/finetune/gone/`", "llama/finetune/gone/: no such file"),
        (unknown_names, "`minifsdp.gone`", "minifsdp.gone: no such module or name"),
        (unknown_names, "`llama.weights.gone(x)`", "llama.weights.gone: no such module or name"),
        (unknown_flags, "`--gone 3`", "--gone: no such flag"),
        (unknown_flags, "`train.py --standalone`", "--standalone: no such flag"),
    ],
)
def test_what_a_page_names_and_is_not_there_is_told(page, check, text: str, problem: str) -> None:
    (told,) = check(page(text))
    assert told.endswith(problem) and told.startswith("README.md:")


def test_what_is_there_is_not_told(page) -> None:
    text = (
        "# Here, `there`\n[it](docs/train-70b.md#slurm), [up](#here-there), [w](https://x.y)\n"
        "`tests/test_train.py::test_x`, `llama/finetune/recipes/`, `minifsdp.collectives`,\n"
        "`llama.weights.load_hf(model, dir)`, `train.py --no-packing`, `--max-restarts 3`, `a/b`"
    )
    for check in (dead_links, missing_files, unknown_names, unknown_flags):
        assert check(page(text)) == []


def test_a_module_that_the_tree_lacks_or_invents_is_told(page) -> None:
    folders = sorted({p.parent.name for p in ROOT.glob("*/*.py")} - {"minifsdp", "llama"})
    tree = [f"{name}/      what it is" for name in folders]
    for package in ("minifsdp", "llama"):
        names = [path.stem for path in sorted((ROOT / package).glob("[a-z]*.py"))]
        names += [f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")]
        tree += [
            "",
            f"{package}/           the, package",
            f"  {names[0]}, {names[1]},  two, of them",
        ]
        tree += [f"├─ {name} is one\n                      goes, on" for name in names[2:]]
    right = "```\n" + "\n".join(tree) + "\n```\n"
    assert wrong_in_tree(page(right)) == []
    broken = right.replace("─ state is", "─ status is").replace("tests/  ", "test/   ")
    told = [problem.partition(": ")[2] for problem in wrong_in_tree(page(broken))]
    assert told == [
        "test/ is not there",
        "minifsdp/status is not there",
        "the tree leaves out minifsdp/state.py",
        "the tree leaves out tests/",
    ]


def test_what_is_not_run_is_looked_at_all_the_same(page) -> None:
    text = "`pytest -m slwo tests/test_gone.py` and `pip install -c gone.txt -e '.[tests]'`"
    broken = page(text)
    told = [problem.rpartition(": ")[2] for problem in wrong_in_unrun(broken, broken.commands)]
    assert told == ["no marker slwo", "no such file", "no such file", "no extra tests"]


def test_a_figure_that_its_command_does_not_print_is_told(page) -> None:
    table = "| a | b |\n|---|---:|\n| x | 1.0 |\n"
    assert stale_tables(page(f"text\n\n{table}"), f"more\n{table}end") == []
    (told,) = stale_tables(page(f"text\n\n{table}"), table.replace("1.0", "1.1"))
    assert told == "README.md:3: not the table that its command prints"
