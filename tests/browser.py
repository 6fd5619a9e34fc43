"""Pages in a real browser: what they look like, how wide they are, and what they complain of."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--hide-scrollbars --enable-logging=stderr --virtual-time-budget=5000"
)


class Shown(NamedTuple):
    """A page as a browser shows it."""

    pixels: np.ndarray  # (height, width, 3) uint8
    answer: Any  # of the script that was put into the page
    complaints: list[str]  # what the browser's console says


def show(page: Path, width: int, height: int, script: str, dark: bool = False) -> Shown:
    """The page in a frame `width` pixels wide (a window cannot be narrower than 500).

    `script` is the body of a function, put at the end of the page, whose result is the answer.
    Raises AssertionError, naming the command to install one, where there is no Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser, f"the page is tested in Chromium, which is not installed: {INSTALL}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ask = f"<script>parent.postMessage((() => {{ {script} }})(), '*')</script>"
        (folder / "page.html").write_text(page.read_text(encoding="utf-8") + ask, encoding="utf-8")
        (folder / "frame.html").write_text(
            "<!DOCTYPE html><title></title><body style='margin:0'><script>"
            "onmessage = event => { document.title = JSON.stringify(event.data); }</script>"
            f"<iframe src=page.html width={width} height={height} style='border:0;display:block'>"
        )
        command = [
            browser,
            *FLAGS.split(),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},{height}",
            f"--screenshot={folder / 'shot.png'}",
            "--dump-dom",
            f"file://{folder / 'frame.html'}",
        ]
        done = subprocess.run(command, capture_output=True, timeout=120)
        said = done.stderr.decode(errors="replace")
        titles = re.findall("<title>(.*?)</title>", done.stdout.decode(errors="replace"), re.S)
        assert titles and titles[0], f"the page did not answer: {said[-2000:]}"
        complaints = re.findall(r"CONSOLE.*", said)
        pixels = read_png((folder / "shot.png").read_bytes())
        return Shown(pixels, json.loads(html.unescape(titles[0])), complaints)


def read_png(content: bytes) -> np.ndarray:
    """The pixels of an RGB or RGBA image of 8 bits, not interlaced: (height, width, 3) uint8."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(content):
        (length,), kind = struct.unpack(">I", content[at : at + 4]), content[at + 4 : at + 8]
        chunk = content[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colours, *_, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlaced) == (8, 0) and colours in (2, 6)
        packed += chunk if kind == b"IDAT" else b""
        at += length + 12
    size = 3 if colours == 2 else 4
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * size)
    return _unfilter(rows[:, 0], rows[:, 1:].reshape(height, width, size))[:, :, :3]


def _unfilter(kinds: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Pixels from the differences stored for them (PNG specification, section 9).

    Each needs those to its left, above it and between the two, so that all of a diagonal can be
    had at once: row `at` of `slanted` holds the pixels whose row and column add up to `at`.
    """
    height, width, size = stored.shape
    slanted = np.zeros((height + width + 1, height + 1, size), np.int16)  # with a margin of zeros
    for at in range(height + width - 1):
        rows = np.arange(max(0, at - width + 1), min(at + 1, height))
        left, up = slanted[at + 1, rows + 1], slanted[at + 1, rows]
        corner = slanted[at, rows]
        target = left + up - corner
        away = [abs(target - value) for value in (left, up, corner)]
        nearest = np.where(away[1] <= away[2], up, corner)
        paeth = np.where((away[0] <= away[1]) & (away[0] <= away[2]), left, nearest)
        guesses = (np.zeros_like(left), left, up, (left + up) // 2, paeth)
        guess = np.choose(kinds[rows][:, None], guesses)
        slanted[at + 2, rows + 1] = (stored[rows, at - rows] + guess) % 256
    down, across = np.indices((height, width))
    return slanted[down + across + 2, down + 1].astype(np.uint8)
