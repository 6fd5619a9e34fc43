"""What a page of the documentation says that can be checked: commands, code, links, names, a tree.

[Note: what counts as a command]
Every line of a fenced block in `sh`, `bash`, `console` or no language at all that begins with a
program, and every code span that begins with `python`, `torchrun`, `pytest` or `pip`. A block
without a language whose first line begins with none of `PROGRAMS` is text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PLAIN = ("cp", "mkdir", "ls", "cat", "git")  # run as they are
PROGRAMS = ("python", "python3", "torchrun", "pytest", "pip", "ruff", "sbatch", "export", *PLAIN)
SPOKEN = ("python", "python3", "torchrun", "pytest", "pip")  # in the middle of a sentence
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n`]*\n(.*?)^ *```[ ]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LOOKS_RUN = re.compile(r"^ *[\w./-]+ +(-\S+ +)*\S+\.py\b|\s--[a-z]", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, without what all its lines are indented by."""

    language: str
    line: int
    text: str


class Command(NamedTuple):
    """One command: its environment (`A=1` or `export A=1`) and its words as text."""

    page: str
    line: int
    text: str
    environment: dict[str, str]
    spoken: bool  # in a sentence, where it may lack what it needs

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


class Script(NamedTuple):
    """A program of several lines, and the file that the page tells the reader to save it in."""

    name: str
    line: int
    text: str


class Page:
    """A Markdown file of the project at `root`."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.text = (root / name).read_text(encoding="utf-8")

    def line_of(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in _FENCE.finditer(self.text):
            indent, language, body = match.groups()
            lines = [line.removeprefix(indent) for line in body.splitlines()]
            found.append(Block(language, self.line_of(match.start()) + 1, "\n".join(lines) + "\n"))
        return found

    @cached_property
    def prose(self) -> str:
        """The page with blanks for its fenced blocks, so that places stay what they are."""
        return _FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), self.text)

    @cached_property
    def spans(self) -> list[tuple[int, str]]:
        """(line, text) of every code span, in one line."""
        return [
            (self.line_of(m.start()), " ".join(m.group(2).split()))
            for m in _SPAN.finditer(self.prose)
        ]

    @property
    def links(self) -> list[tuple[int, str]]:
        return [(self.line_of(m.start()), m.group(1)) for m in _LINK.finditer(self.prose)]

    @property
    def anchors(self) -> set[str]:
        """The headings as GitHub names them in links."""
        words = (re.sub(r"[`*_\[\]]|\(.*?\)(?=$)", "", h) for h in _HEADING.findall(self.prose))
        return {re.sub(r"[^\w\- ]", "", w.lower()).strip().replace(" ", "-") for w in words}

    @cached_property
    def commands(self) -> list[Command]:
        """Every command, in the order of the page. Raises ValueError for what may be one."""
        found: list[Command] = []
        for block in self.blocks:
            if block.language in ("", "sh", "bash", "shell", "console"):
                found += self._in_block(block)
        for line, span in self.spans:
            words = span.split()
            if words[0] in SPOKEN and len(words) > 1:
                found.append(Command(self.name, line, span, {}, spoken=True))
        return sorted(found, key=lambda command: command.line)

    def _in_block(self, block: Block) -> Iterator[Command]:
        lines = list(_logical_lines(block))
        if any(text.startswith("$ ") for _, text in lines):  # what has no prompt is output
            lines = [(n, text[2:]) for n, text in lines if text.startswith("$ ")]
        lines = [(n, text) for n, text in lines if text and not text.startswith("#")]
        if not lines or (not block.language and _program(lines[0][1]) not in PROGRAMS):
            if _LOOKS_RUN.search(block.text):
                raise ValueError(
                    f"{self.name}:{block.line}: commands of an unknown program? Mark the block as "
                    "text, or add the program to PROGRAMS"
                )
            return
        exported: dict[str, str] = {}
        for line, text in lines:
            for part in re.split(r" && ", text):
                environment, rest = _environment(part)
                program = rest.split()[0] if rest else "export"
                if program not in PROGRAMS:
                    raise ValueError(f"{self.name}:{line}: unknown program {program!r}: {text}")
                if program == "export":
                    exported |= _environment(rest.partition(" ")[2])[0] | environment
                    continue
                yield Command(self.name, line, rest, exported | environment, spoken=False)

    @cached_property
    def scripts(self) -> list[Script]:
        """Every block of Python as a program: see `_spliced`."""
        found: list[Script] = []
        base: Script | None = None
        for block in self.blocks:
            if block.language not in ("python", "py"):
                continue
            after = self.text.split("\n", block.line + block.text.count("\n"))[-1][:400]
            named = re.search(r"[Ss]aved? (?:it |this )?as\s+`(\w+\.py)`", after.split("```")[0])
            name = named.group(1) if named else f"lines_{block.line}.py"
            text = "\n" * (block.line - 1) + block.text  # so that tracebacks tell the page's lines
            if base is None or "init_process_group" in block.text:
                base = Script(name, block.line, text)
                found.append(base)
            else:
                found.append(Script(name, block.line, _spliced(base.text, block.text)))
        return found


def _logical_lines(block: Block) -> Iterator[tuple[int, str]]:
    """(line of the page, text) with lines that end in a backslash joined, comments cut off."""
    start, joined = 0, ""
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        start = start or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1].strip() + " "
            continue
        yield start, re.sub(r"\s+# .*$", "", joined + line.strip()).strip()
        start, joined = 0, ""


def _environment(text: str) -> tuple[dict[str, str], str]:
    """The `A=1 B=2` that a command begins with, and the rest."""
    found: dict[str, str] = {}
    while match := re.match(r"([A-Z_][A-Z0-9_]*)=(\S*)\s*", text):
        found[match.group(1)] = shlex.split(match.group(2) or "''")[0]
        text = text[match.end() :]
    return found, text


def _program(text: str) -> str:
    rest = _environment(text)[1]
    return rest.split()[0] if rest else ""


_ASSIGNED = re.compile(r"^(\w+) = ", re.MULTILINE)


def _spliced(script: str, fragment: str) -> str:
    """`script` with `fragment` where it belongs.

    That is in place of the statement that assigns what it assigns, else before the end of the
    process group, or at the end. `without NAME` in a comment of it takes calls of NAME out.
    """
    for name in re.findall(r"without `?(\w+)`?", " ".join(re.findall(r"#(.*)", fragment))):
        script = re.sub(rf"^( *){name}\(.*\)$", r"\1pass", script, flags=re.MULTILINE)
    for name in _ASSIGNED.findall(fragment):
        pattern = rf"^{name} = .*(?:\n[ )\]}}].*)*"
        if re.search(pattern, script, re.MULTILINE):
            return re.sub(pattern, lambda _: fragment, script, count=1, flags=re.MULTILINE)
    head, end, tail = script.partition("dist.destroy_process_group()")
    return head + fragment + end + tail
