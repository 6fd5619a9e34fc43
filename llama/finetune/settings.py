"""Flags out of a TOML file: `--config run.toml`, or the name of a recipe shipped in `recipes/`.

[Note: a file becomes words]
Every key is turned into the words that would be typed for it, and they are put before those of the
command line. So argparse converts and checks both alike, and where a flag is given twice the
command line, which comes last, wins. Which flags there are, and what they take, argparse tells
nowhere publicly: it is found by parsing words on a probe that shares the parser's flags.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

RECIPES = Path(__file__).parent / "recipes"
_KEY = re.compile(r"\w[\w-]*")
# Of these a command line's replaces a file's, whichever they are: together they are refused.
_EITHER = ({"steps", "epochs"}, {"resume", "overwrite"})


def expand(argv: list[str], parser: argparse.ArgumentParser, recipes: Path = RECIPES) -> list[str]:
    """`argv` with `--config NAME` replaced by the words of that file, which come before all others.

    Keys are long names of flags, with dashes or underscores, by themselves or in tables of any
    name. Switches are `true` or `false`; `false` gives `--no-KEY` where there is one, else nothing.
    A switch without a `--no-` form that the file turns on stays on: the command line has no word
    against it. Flags of several values take a list. Paths are relative to the working directory, as
    on the command line, not to the file. A name that is no file is one of `recipes`. `parser` may
    not require any argument.

    Raises ValueError for a file that is missing or not TOML, an unknown or repeated key, and a
    value that `parser` refuses, naming file and key.
    """
    name, rest = _taken_out(argv, recipes)
    if name is None:
        return argv
    path = _find(name, recipes)
    words: list[str] = []
    probe, keys = _Probe.of(parser), {}
    replaced = probe.replaced_by(rest)
    for key, value in _entries(_read(path)):
        try:
            flag = probe.flag(key)
            added = probe.words(flag, value)
            target = next(iter(probe.given(*(added or [flag]))[0]), flag)
            if target in keys:
                same = "is given twice" if keys[target] == key else f"says what {keys[target]} says"
                raise ValueError(f"{same}: keep one")
        except ValueError as reason:
            raise ValueError(f"{path}: {key}: {reason}") from None
        keys[target] = key
        words += added if target not in replaced else []
    return [*words, *rest]


def _taken_out(argv: list[str], recipes: Path) -> tuple[str | None, list[str]]:
    """What `--config` names, None if it is not given; and the other words."""
    names, rest, strays = [], [], []
    words, loose = iter(argv), True
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--config":
            names.append(value if equals else next(words, ""))
            loose = True  # a word without a flag must not join the list that stood before
            continue
        if loose and not word.startswith("-"):
            strays.append(word)
        loose = False
        rest.append(word)
    if not names:
        return None, argv
    if len(names) > 1:
        raise ValueError(f"--config is given {len(names)} times: give one, the rest as flags")
    if not names[0] or names[0].startswith("-"):
        raise ValueError(f"--config needs a file or a recipe: {_names(recipes)}")
    if strays:
        raise ValueError(f"{strays[0]!r} belongs to no flag (--help lists the flags)")
    return names[0], rest


def _find(name: str, recipes: Path) -> Path:
    path, shipped = Path(name), recipes / f"{name}.toml"
    if path.is_file():
        return path
    if path.name == name and shipped.is_file():
        return shipped
    what = "is a folder, not a file" if path.is_dir() else "no such file"
    raise ValueError(f"--config {name}: {what}, nor is it a recipe: {_names(recipes)}")


def _names(recipes: Path) -> str:
    return ", ".join(sorted(path.stem for path in recipes.glob("*.toml")))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as reason:  # which tells line and column
        raise ValueError(f"{path}: not valid TOML: {reason}") from None
    except UnicodeDecodeError as reason:
        raise ValueError(f"{path}: not UTF-8 text: {reason.reason}") from None
    except OSError as reason:
        raise ValueError(f"{path}: cannot be read: {reason.strerror}") from None


def _entries(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys that hold values, those of tables within tables included."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield key, value


class _Probe(argparse.ArgumentParser):
    """Tries words on the flags of another parser, without printing or leaving."""

    @classmethod
    def of(cls, parser: argparse.ArgumentParser) -> _Probe:
        """A probe of the flags of `parser`."""
        return cls(parents=[parser], add_help=False, allow_abbrev=False, exit_on_error=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise LookupError("a flag that prints something and ends is no setting")

    def print_help(self, file: Any = None) -> None:
        """Nothing."""

    def given(self, *words: str) -> tuple[dict[str, Any], list[str]]:
        """What `words` set, by name, and the words that no flag takes; ValueError says why not."""
        blank = argparse.Namespace(**dict.fromkeys(vars(self.parse_args([]))))
        try:
            _, left = self.parse_known_args(words, blank)
        except argparse.ArgumentError as reason:
            raise ValueError(reason.message) from None
        return {name: value for name, value in vars(blank).items() if value is not None}, left

    def replaced_by(self, words: list[str]) -> set[str]:
        """What a file must not set beside what `words` set."""
        try:
            given = set(self.given(*words)[0])
        except (LookupError, ValueError):
            return set()  # whoever parses the words says why
        return {name for either in _EITHER if given & either for name in either - given}

    def knows(self, flag: str) -> bool:
        """Whether there is such a flag, with or without a value."""
        try:
            return not self.given(flag)[1]
        except LookupError:
            return False
        except ValueError:
            return True

    def flag(self, key: str) -> str:
        """The flag that `key` names; ValueError, with the nearest one, where there is none."""
        if key == "config":
            raise ValueError("a file cannot name another: put its keys here")
        spelled = (key.replace("_", "-"), key, key.replace("-", "_"))
        known = [name for name in spelled if _KEY.fullmatch(name) and self.knows(f"--{name}")]
        if not known:
            shown = sorted(set(re.findall(r"(?<![\w-])--(\w[\w-]*)", self.format_help())))
            flags = [name for name in shown if name != "config" and self.knows(f"--{name}")]
            near = difflib.get_close_matches(spelled[0], flags, 1)
            hint = f": did you mean {near[0]}?" if near else " (--help lists the flags)"
            raise ValueError(f"there is no such flag{hint}")
        positive = known[0].removeprefix("no-")
        if positive != known[0] and self.knows(f"--{positive}"):
            raise ValueError(f"write {positive} = true or false")
        return f"--{known[0]}"

    def words(self, flag: str, value: Any) -> list[str]:
        """What is typed to give `flag` this `value`; ValueError for one that it does not take."""
        if isinstance(value, bool):
            if not self._stands_alone(flag):
                raise ValueError(f"takes a value, not {str(value).lower()}")
            off = f"--no-{flag[2:]}"
            return [flag] if value else [off] if self.knows(off) else []
        if self._is_switch(flag):
            raise ValueError(f"is a switch: it is true or false, not {value!r}")
        values = value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                raise ValueError(f"takes text, numbers or a list of them, not {one!r}")
        # One word where it can be: then the value may begin with a dash.
        words = [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *map(str, values)]
        parsed, left = self.given(*words)
        taken = next(iter(parsed.values()), None)
        several = isinstance(taken, list | tuple)
        if isinstance(value, list) and not several:
            raise ValueError("takes one value, not a list")
        if left or len(parsed) > 1 or (several and len(taken) != len(values)):
            if any(word.startswith("-") for word in words[1:]):
                raise ValueError("in a list, what begins with a dash would be read as a flag")
            raise ValueError(f"takes {len(taken)} values, not {len(values)}")
        return words

    def _stands_alone(self, flag: str) -> bool:
        """Whether `flag` may be given without a value."""
        try:
            return bool(self.given(flag)[0])
        except ValueError:
            return False

    def _is_switch(self, flag: str) -> bool:
        """Whether `flag` takes no value."""
        try:
            return bool(self.given(flag, "x")[1])
        except ValueError:
            return False
