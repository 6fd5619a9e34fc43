"""`python -m minifsdp.plan`: its exit codes, mistakes told in a line, files that stay whole."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp.plan import GPU
from minifsdp.plan.__main__ import main
from minifsdp.plan.report import Report


class Answers(NamedTuple):
    """What a model may return besides a tensor."""

    loss: torch.Tensor
    hidden: torch.Tensor


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, rows: torch.Tensor) -> Answers:
        hidden = self.linear(rows)
        return Answers(hidden.sum(), hidden)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _sharded(model: nn.Module) -> nn.Module:
    return minifsdp.fully_shard(model, mesh=init_device_mesh(GPU, (dist.get_world_size(),)))


def build():
    with torch.device("meta"):
        return _sharded(nn.Linear(8, 6)), _adamw


def build_wide():
    """4 GiB whole, in float32."""
    with torch.device("meta"):
        return _sharded(nn.Linear(2**15, 2**15, bias=False)), _adamw


def build_answering():
    with torch.device("meta"):
        return _sharded(Answering()), _adamw


def build_real():
    return _sharded(nn.Linear(8, 6)), _adamw


def build_weights():
    with torch.device("meta"):
        model = nn.Linear(8, 6)
    return _sharded(model.to_empty(device=GPU)), _adamw


def build_raising():
    return {"7b": build}["70b"]()


def build_warning():
    for module in ("torch.planted", "own"):
        warnings.warn_explicit(f"of {module}", UserWarning, "file", 1, module)
    return build()


def build_model_alone():
    return build()[0]


def batch():
    return (torch.zeros(5, 8),)


def bare():
    return torch.zeros(5, 8)


def wide():
    return torch.zeros(1, 2**15)


def wrong():
    return torch.zeros(5, 9)


def text():
    return "a b c"


def loss_of(answers: Answers) -> torch.Tensor:
    return answers.loss


def hidden_of(answers: Answers) -> torch.Tensor:
    return answers.hidden


def plan(*flags: str, build: str = "build", batch: str = "batch") -> int:
    functions = ["--build", f"{__name__}:{build}", "--batch", f"{__name__}:{batch}"]
    return main([*functions, "--world-size", "4", "--gpu", "24", *flags])


def test_the_exit_code_says_whether_it_fits(capsys):
    assert plan() == 0
    assert "fits: at most" in capsys.readouterr().out
    assert plan("--gpu", "8", build="build_wide", batch="wide") == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "0 if the run fits, 1 if it does not, 2 for a mistake" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("flags", "functions", "told"),
    [
        (["--gpu", "A9"], {}, "no GPU 'A9'"),
        (["--gpu", "nan"], {}, "nan GB cannot be planned"),
        (["--nodes", "3"], {}, r"nodes 3 (--nodes) cannot share 4 ranks evenly"),
        (["--price", "2"], {}, "give steps (--steps) too"),
        (["--json", "nowhere/x.json"], {}, "--json nowhere/x.json: there is no folder nowhere"),
        (["--page", "x.txt"], {}, "--page x.txt must end in .html"),
        (["--build", "nowhere:build"], {}, "--build nowhere:build: No module named 'nowhere'"),
        (["--loss", "math:pi"], {}, "--loss math:pi is a float: give a function"),
        ([], {"build": "build_real"}, "build on torch.device('meta')"),
        ([], {"build": "build_weights"}, "build on torch.device('meta')"),
        ([], {"build": "build_raising"}, f"{__file__}, line {{raising}}: KeyError: '70b'"),
        ([], {"build": "build_model_alone"}, "build() returned a FSDPLinear: return the sharded"),
        ([], {"build": "build_answering"}, "the model returns a Answers, which a plan cannot sum"),
        ([], {"batch": "text"}, "batch() returned a str: return a tensor, a tuple"),
        ([], {"batch": "wrong"}, "RuntimeError: a and b must have same reduction dim"),
        (["--loss", f"{__name__}:hidden_of"], {"build": "build_answering"}, "shape (5, 6)"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_ends_with_2(capfd, flags, functions, told):
    lines = Path(__file__).read_text().splitlines()
    raising = next(n for n, line in enumerate(lines, 1) if '["70b"]()' in line)
    assert plan(*flags, **functions) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert told.format(raising=raising) in err
    assert not dist.is_initialized()


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
@pytest.mark.parametrize("flag", ["--clip", "--price", "--network", "--host-memory", "--steps"])
def test_numbers_that_cannot_be_are_refused_by_their_flag(capsys, flag, value):
    with pytest.raises(SystemExit) as ending:
        plan(f"{flag}={value}")
    assert ending.value.code == 2
    assert f"argument {flag}: must be" in capsys.readouterr().err


def test_a_crash_of_the_plan_itself_ends_with_2_and_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr("minifsdp.plan.report.simulate", None)
    assert plan() == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bare_tensor_is_one_argument_and_a_loss_may_be_told(capsys):
    assert plan(batch="bare") == 0
    assert "5 tokens a rank and step" in capsys.readouterr().out
    assert plan("--loss", f"{__name__}:loss_of", build="build_answering") == 0


def test_a_file_that_cannot_be_written_costs_neither_the_text_nor_the_other(
    tmp_path, capsys, monkeypatch
):
    def full(path: Path, *_, **__) -> None:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    write = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda p, *a, **k: (full if ".html" in p.name else write)(p, *a, **k)
    )
    (tmp_path / "plan.html").touch()
    flags = ["--page", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")]
    assert plan(*flags) == 2
    out, err = capsys.readouterr()
    assert "fits: at most" in out
    assert f"--page {tmp_path / 'plan.html'} was not written" in err and "No space" in err
    assert json.loads((tmp_path / "plan.json").read_text())["fits"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]


def test_an_older_file_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    assert plan("--json", str(tmp_path / "plan.json")) == 0
    before = (tmp_path / "plan.json").read_text()
    monkeypatch.setattr(Report, "as_dict", lambda self: {"half": self})
    assert plan("--json", str(tmp_path / "plan.json")) == 2
    assert (tmp_path / "plan.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_gpu_known_by_its_size_is_said_to_be_timed_as_another(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert plan("--page", str(page), "--steps", "1", "--price", "3") == 0
    told = capsys.readouterr().out
    assert "4 x 24 GB (timed as an A100-80), 1 node;" in told
    assert "1 step: " in told and "0.00 s" not in told and "\n\n\n" not in told
    assert "<h1>Plan for 4 x 24 GB (timed as an A100-80)</h1>" in page.read_text()
    assert plan("--gpu", "L4-24") == 0
    assert "timed as" not in capsys.readouterr().out


def test_torch_is_quiet_while_a_plan_is_made_and_not_afterwards(recwarn):
    logger, logged = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = logged.append
    logger.addHandler(handler)
    try:
        assert plan(batch="wrong", build="build_warning") == 2
        assert logged == []
        assert [str(warning.message) for warning in recwarn] == ["of own"]
        logger.error("again")
        assert len(logged) == 1
    finally:
        logger.removeHandler(handler)
