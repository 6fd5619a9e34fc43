"""docs/from-fsdp.md: complete against the torch that is installed, and its code says the truth."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.fsdp as upstream
from pages import Page
from torch.distributed.fsdp import wrap

import minifsdp

PAGE = Page(Path(__file__).parents[1], "docs/from-fsdp.md")
OLD = upstream.FullyShardedDataParallel
NAMED = {name for _, span in PAGE.spans for name in re.findall(r"\w+", span)}


def _public(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def _arguments(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("FullyShardedDataParallel's arguments", _arguments(OLD.__init__)),
        ("FullyShardedDataParallel's methods", _public(OLD)),
        ("sharding strategies", list(upstream.ShardingStrategy.__members__)),
        ("ways to prefetch", list(upstream.BackwardPrefetch.__members__)),
        ("state dict types", list(upstream.StateDictType.__members__)),
        ("fields of MixedPrecision", list(upstream.MixedPrecision.__dataclass_fields__)),
        ("fields of CPUOffload", list(upstream.CPUOffload.__dataclass_fields__)),
        ("wrapping policies", wrap.__all__),
        ("fully_shard's arguments", _arguments(upstream.fully_shard)),
        ("FSDPModule's methods", _public(upstream.FSDPModule)),
        ("fields of policies", list(upstream.MixedPrecisionPolicy.__dataclass_fields__)),
        ("fields of policies", list(upstream.CPUOffloadPolicy.__dataclass_fields__)),
        ("minifsdp's names", minifsdp.__all__),
    ],
)
def test_the_page_names_every(of: str, names: list[str]) -> None:
    assert [name for name in names if name not in NAMED] == [], of


def test_the_page_names_what_else_fsdp2_exports() -> None:
    exported = {name for name in upstream.__all__ if name in dir(upstream._fully_shard)}
    assert exported and exported <= NAMED


def test_methods_said_to_be_the_same_are_here_and_refused_ones_are_refused() -> None:
    same, refused = (
        PAGE.text.partition(f"### {head}\n")[2].partition("\n### ")[0]
        for head in ("What is the same", "What is refused, by name")
    )
    for name in _public(upstream.FSDPModule):
        source = inspect.getsource(getattr(minifsdp.FSDPModule, name))
        assert f"`{name}`" in (refused if "_refuse(" in source else same), name


# ---- Before and after -----------------------------------------------------------------------


class Pair(NamedTuple):
    """Two blocks of code that are said to print the same."""

    line: int
    before: str
    after: str
    exact: bool


def pairs() -> list[Pair]:
    """The page's blocks that begin `# before`, each with the one after it."""
    code = [block for block in PAGE.blocks if block.language == "python"][1:]
    said = re.compile(r"# after, (bit for bit|to rounding)\n")
    found = []
    for before, after in zip(code[::2], code[1::2], strict=True):
        match = said.match(after.text)
        assert before.text.startswith("# before, ") and match, f"line {after.line}"
        found.append(Pair(before.line, before.text, after.text, match.group(1) == "bit for bit"))
    return found


def _printed(folder: str, text: str) -> list[float]:
    """The numbers that a block prints after the page's first one, in the group that is there."""
    base = next(block.text for block in PAGE.blocks if block.language == "python")
    base = re.sub(r"^dist\.(init|destroy)_process_group\(.*$", "", base, flags=re.MULTILINE)
    os.chdir(folder)
    said = io.StringIO()
    names: dict[str, object] = {"__name__": "page"}
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(base + text, str(PAGE.name), "exec"), names)
    return [float(number) for number in said.getvalue().split()]


def _both(folder: str, pair: Pair) -> tuple[list[float], list[float]]:
    before = os.getcwd()
    try:
        return _printed(folder, pair.before), _printed(folder, pair.after)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("pair", pairs(), ids=[f"line {p.line}" for p in pairs()])
def test_losses_after_are_the_losses_before(pair: Pair, run_ranks, tmp_path: Path) -> None:
    for before, after in run_ranks(2, _both, str(tmp_path), pair):
        assert len(set(before)) == len(before) >= 3
        if pair.exact:
            assert after == before
        else:
            assert after == pytest.approx(before, rel=1e-5)
