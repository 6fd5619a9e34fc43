"""The slow network runs where the system allows it, and says why where it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import slow_network

ROOT = Path(__file__).parent.parent


@pytest.mark.slow  # a minute, and timings need an idle machine
def test_prefetch_hides_part_of_a_slow_network(tmp_path):
    try:
        with slow_network.joined_namespaces(500):
            pass
    except slow_network.Skipped as why:
        pytest.skip(f"no network namespaces: {why}")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.slow_network", "--rounds", "2", "--mbit", "500"]
    done = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seconds = json.loads(file.read_text())["seconds"]
    assert set(seconds) == {
        "with prefetch",
        "without prefetch",
        "compute only",
        "communication only",
    }
    assert seconds["with prefetch"] < 0.9 * seconds["without prefetch"]
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert "minifsdp" not in left


def test_a_machine_that_refuses_is_told_why(monkeypatch, capsys):
    monkeypatch.setattr(slow_network.shutil, "which", lambda tool: None)
    monkeypatch.setattr(sys, "argv", ["slow_network"])
    slow_network.main()
    assert capsys.readouterr().out.startswith("skipped: no ip or tc")
