"""A TOML file of flags, as if typed before the command line, which wins; the recipes shipped."""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llama import LlamaConfig
from llama.finetune.arguments import parse_args
from llama.finetune.flags import build_parser
from llama.finetune.settings import RECIPES, expand

GIB = 2**30


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_parser() -> argparse.ArgumentParser:
    """A parser of another program, which ends the process where a flag is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--rate", "--learning-rate", type=float)
    parser.add_argument("--under_scored", type=int, default=7)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--pair", nargs=2, type=int)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--pack", action=argparse.BooleanOptionalAction)
    parser.add_argument("--again", nargs="?", const="last", choices=("last", "auto"))
    parser.add_argument("--kind", choices=("a", "b"), default="a")
    return parser


def read(text: str, *argv: str) -> argparse.Namespace:
    Path("run.toml").write_text(text, encoding="utf-8")
    parser = small_parser()
    return parser.parse_args(expand(["--config", "run.toml", *argv], parser))


def test_without_a_file_the_words_are_as_they_were() -> None:
    argv = ["--rate", "1", "--names", "a"]
    assert expand(argv, small_parser()) is argv


def test_keys_are_long_names_with_dashes_or_underscores_in_tables_of_any_name(in_tmp: Path) -> None:
    args = read('under-scored = 3\n[a]\nlearning_rate = 5e-5\n[a.b]\nkind = "b"\n')
    assert (args.under_scored, args.rate, args.kind) == (3, 5e-5, "b")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("fast = true", "fast", True),
        ("fast = false", "fast", False),
        ("pack = true", "pack", True),
        ("pack = false", "pack", False),
        ("again = true", "again", "last"),
        ('again = "auto"', "again", "auto"),
        ("again = false", "again", None),
        ('names = ["a", "b c"]', "names", ["a", "b c"]),
        ('names = "a"', "names", ["a"]),
        ('names = ["-a"]', "names", ["-a"]),
        ("pair = [1, -2]", "pair", [1, -2]),
        ("rate = -1.5", "rate", -1.5),
        ('rate = "2"', "rate", 2.0),
    ],
)
def test_a_value_is_what_its_flag_would_make_of_it(
    line: str, name: str, value: Any, in_tmp: Path
) -> None:
    assert getattr(read(line), name) == value


def test_the_command_line_wins(in_tmp: Path) -> None:
    text = 'rate = 1\nnames = ["a", "b"]\npack = true\nkind = "a"\nunder_scored = 3\n'
    args = read(text, "--rate=2", "--names", "c", "--no-pack", "--kind", "b")
    assert (args.rate, args.names, args.pack, args.kind) == (2.0, ["c"], False, "b")
    assert args.under_scored == 3


def test_what_the_command_line_says_otherwise_replaces_the_file(in_tmp: Path) -> None:
    Path("run.toml").write_text("epochs = 3\noverwrite = true\nseed = 1\n")
    argv = ["--config=run.toml", "--steps", "5", "--resume"]
    assert expand(argv, build_parser()) == ["--seed=1", "--steps", "5", "--resume"]


def test_a_plain_switch_that_the_file_turns_on_stays_on(in_tmp: Path) -> None:
    with pytest.raises(SystemExit):
        read("fast = true", "--no-fast")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate =", "run.toml: not valid TOML: .*"),
        ("kind = 1\nrate = = 2", r"run.toml: not valid TOML: .*line 2"),
        ("rat = 1", r"run.toml: rat: there is no such flag: did you mean rate\?"),
        ("frobnicate = 1", r"run.toml: frobnicate: there is no such flag \(--help lists"),
        ('"--rate" = 1', r"run.toml: --rate: there is no such flag: did you mean rate\?"),
        ('"" = 1', "run.toml: : there is no such flag"),
        ("help = true", "run.toml: help: there is no such flag"),
        ('config = "b.toml"', "run.toml: config: a file cannot name another"),
        ('rate = "x"', "run.toml: rate: invalid float value: 'x'"),
        ("rate = true", "run.toml: rate: takes a value, not true"),
        ("rate = false", "run.toml: rate: takes a value, not false"),
        ("rate = [1]", "run.toml: rate: takes one value, not a list"),
        ("rate = [1, 2]", "run.toml: rate: takes one value, not a list"),
        ("rate = 1979-05-27", "run.toml: rate: takes text, numbers or a list of them"),
        ("names = [[1]]", "run.toml: names: takes text, numbers or a list of them"),
        ("names = [true]", "run.toml: names: takes text, numbers or a list of them"),
        ("names = []", "run.toml: names: expected at least one argument"),
        ("pair = [1, 2, 3]", "run.toml: pair: takes 2 values, not 3$"),
        ('names = ["a", "--fast"]', "run.toml: names: in a list, what begins with a dash"),
        ("[[rate]]\nx = 1", "run.toml: rate: takes text, numbers or a list of them"),
        ("fast = 1", "run.toml: fast: is a switch: it is true or false, not 1"),
        ('pack = "no"', "run.toml: pack: is a switch: it is true or false, not 'no'"),
        ("no_pack = true", "run.toml: no_pack: write pack = true or false"),
        ('again = "x"', "run.toml: again: invalid choice: 'x'"),
        ('kind = "c"', "run.toml: kind: invalid choice: 'c'"),
        ("under-scored = 1\nunder_scored = 1", "run.toml: under_scored: says what under-scored"),
        ("rate = 1\n[b]\nrate = 1", "run.toml: rate: is given twice: keep one"),
        ("rate = 1\nlearning-rate = 1", "run.toml: learning-rate: says what rate says: keep one"),
        ("fast = false\n[b]\nfast = true", "run.toml: fast: is given twice: keep one"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(text: str, message: str, in_tmp: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read(text)


def test_the_flag_s_own_error_is_the_file_s(in_tmp: Path) -> None:
    Path("run.toml").write_text("lr = -1\n")
    with pytest.raises(ValueError, match="argument --lr: must be a number, 0 or more, not -1 "):
        build_parser().parse_args(["--lr=-1"])
    with pytest.raises(ValueError, match=r"^run.toml: lr: must be a number, 0 or more, not -1$"):
        expand(["--config", "run.toml"], build_parser())


def test_bytes_that_are_no_text_are_refused_and_a_mark_of_order_is_not(in_tmp: Path) -> None:
    Path("run.toml").write_bytes(b"kind = '\xff'")
    with pytest.raises(ValueError, match=r"run.toml: not UTF-8 text"):
        expand(["--config", "run.toml"], small_parser())
    assert read("\ufeffrate = 1").rate == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "--config needs a file or a recipe: .*70b-16x80gb"),
        (["--config", "--fast"], "--config needs a file or a recipe"),
        (["--config=absent.toml"], "--config absent.toml: no such file, nor .*: .*70b-16x80gb"),
        (["--config", "."], r"--config \.: is a folder, not a file"),
        (["--config", "../recipes/70b-16x80gb"], "no such file"),
        (["--config", "run.toml", "--config", "run.toml"], "--config is given 2 times"),
        (["--config", "run.toml", "c"], "'c' belongs to no flag"),
        (["c", "--config", "run.toml"], "'c' belongs to no flag"),
        (["--names", "c", "--config", "run.toml", "d"], "'d' belongs to no flag"),
    ],
)
def test_what_cannot_be_a_file_or_would_join_its_lists_is_refused(
    argv: list[str], message: str, in_tmp: Path
) -> None:
    Path("run.toml").write_text('names = ["a", "b"]\n')
    with pytest.raises(ValueError, match=message):
        expand(argv, small_parser())


def test_a_file_comes_before_a_recipe_of_its_name(in_tmp: Path) -> None:
    assert "--bf16" in expand(["--config", "7b-8x80gb"], build_parser())
    Path("7b-8x80gb").write_text("seed = 1")
    assert expand(["--config", "7b-8x80gb"], build_parser()) == ["--seed=1"]


# ---- Recipes --------------------------------------------------------------------------------

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def gpus(name: str) -> tuple[int, int]:
    """How many GPUs a recipe is for, and of how many GB each."""
    count, size = re.search(r"(\d+)x(\d+)gb", name).groups()
    return int(count), int(size)


def test_there_are_recipes_for_each_size_and_for_the_machines_people_have() -> None:
    for name in ("7b-8x80gb", "13b-8x80gb", "70b-16x80gb", "70b-8x80gb-offload", "70b-lora-8x80gb"):
        assert name in NAMES
    assert "70b-32x24gb-offload" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_accepted_on_its_number_of_ranks(name: str, in_tmp: Path) -> None:
    Path("chats.jsonl").write_text('{"text": "hi"}\n')
    argv = ["--config", name, "--model", "llama", "--data", "chats.jsonl"]
    args = parse_args(argv, gpus(name)[0])
    assert args.bf16 and args.activation_checkpointing
    assert args.cpu_offload == name.endswith("-offload")
    assert bool(args.lora_rank) == ("lora" in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_how_it_is_launched(name: str) -> None:
    text = (RECIPES / f"{name}.toml").read_text()
    nodes = int((re.search(r"--nnodes (\d+)", text) or [0, 1])[1])
    assert nodes * int(re.search(r"--nproc-per-node (\d+)", text)[1]) == gpus(name)[0]
    assert f"train.py --config {name} --model llama-2-{name.split('-')[0]} --data" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_that_a_recipe_names_is_the_formula_s_and_fits(name: str) -> None:
    text = (RECIPES / f"{name}.toml").read_text()
    settings = {k: v for table in tomllib.loads(text).values() for k, v in table.items()}
    config, (ranks, size_gb) = LlamaConfig.preset(name.split("-")[0]), gpus(name)
    kv_dim = config.n_kv_heads * config.head_dim
    tokens = settings["micro-batch"] * settings["seq-len"]
    block = 2 * config.dim * (config.dim + kv_dim) + 3 * config.dim * config.ffn_hidden
    shards, units = 16 * config.num_parameters, 5
    if rank := settings.get("lora-rank"):
        widths = (
            2 * 2 * config.dim + 2 * (config.dim + kv_dim) + 3 * (config.dim + config.ffn_hidden)
        )
        shards = 2 * config.num_parameters + 16 * config.n_layers * rank * widths
        units = 3
    parts = [
        *([] if settings.get("cpu-offload") else [shards / ranks]),
        units * 2 * (block + 2 * config.dim),
        2 * config.dim * config.n_layers * tokens,
        (20 * config.dim + 4 * kv_dim + 8 * config.ffn_hidden) * tokens,
        2 * 64 * 2**20,
    ]
    said = re.search(r"Memory of a GPU.*?\.\n", text, re.DOTALL)[0].replace("\n#  ", "")
    numbers = [float(number) for number in re.findall(r"(\d+\.\d) ", said)]
    assert numbers == [round(part / GIB, 1) for part in (sum(parts), *parts)]
    room_gib = {24: 22.3, 80: 79.2}[size_gb]  # 24e9 bytes; what an A100-80GB shows
    assert sum(parts) / GIB < 0.96 * room_gib  # CUDA and NCCL take the rest
    if settings.get("cpu-offload"):
        host = re.search(r"host, .*: (\d+) GiB for its (\d+) ranks", text.replace("\n#  ", ""))
        assert int(host[1]) == round(shards / ranks * int(host[2]) / GIB)
