"""Sources, as they are given on the command line, into a corpus."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llama.finetune.data.cache import check_cache, tokenised
from llama.finetune.data.corpus import Corpus, Part, Piece, cut
from llama.finetune.data.reading import SUFFIXES
from llama.finetune.data.store import Refused
from llama.finetune.data.templates import TEMPLATES
from llama.tokenizer import Tokenizer

ON_BAD_LINE = ("error", "skip")
BESIDE_DATA = ("readme", "license", "licence")  # how names begin of what may lie in a folder of it


class Source(NamedTuple):
    """The files that one argument names, and how often their examples are seen in an epoch."""

    name: str
    files: list[Path]
    weight: float


def load(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    seq_len: int,
    template: str = "auto",
    on_bad_line: str = "error",
    cache_dir: str | Path | None = None,
) -> Corpus:
    """The examples of all sources, each at most `seq_len` tokens long.

    A source is a file, or a folder of `.jsonl`, `.txt` and `.npy` files, with "=WEIGHT" behind it
    or not (see `source_of`). `cache_dir` keeps what was tokenised for the next run and for other
    ranks; None keeps nothing. With `on_bad_line` "skip", lines that cannot be trained on are in the
    corpus's `refused`. Raises FileNotFoundError for a missing file; ValueError with "error" for the
    first such line, as "file:line: reason", always for a file that yields nothing, and for
    arguments that are none.
    """
    if seq_len < 2:
        raise ValueError(f"a sequence length of {seq_len} has nothing to learn: use 2 or more")
    for name, value, known in (
        ("template", template, TEMPLATES),
        ("on_bad_line", on_bad_line, ON_BAD_LINE),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is unknown; there are {', '.join(known)}")
    found = [source_of(source) for source in sources]
    if not found:
        raise ValueError("there is no data: give a file or a folder")
    if cache_dir is not None:
        cache_dir = Path(cache_dir)
        check_cache(cache_dir)
    pieces: list[Piece] = []
    parts: list[Part] = []
    all_refused: list[Refused] = []
    count = 0
    for source in found:
        first = count
        for path in source.files:
            store = tokenised(path, tokenizer, template, cache_dir)
            spans, too_long = cut(store, seq_len)
            refused = [Refused(str(path), *line) for line in sorted([*store.refused, *too_long])]
            all_refused += refused
            if not len(spans.lengths) and (on_bad_line == "skip" or not refused):
                raise ValueError(_nothing(path, refused))
            pieces.append(Piece(str(path), store, spans))
            count += len(spans.lengths)
        parts.append(Part(source.name, first, count - first, source.weight))
    if all_refused and on_bad_line == "error":
        more = len(all_refused) - 1
        raise ValueError(f"{all_refused[0]}" + f" (lines refused after it: {more})" * (more > 0))
    return Corpus.joined(pieces, parts, all_refused)


def source_of(argument: str | Path) -> Source:
    """Read `PATH` or `PATH=WEIGHT`; a file or folder that is really named so wins.

    Of a folder, all files of a known kind directly in it, by name; hidden ones, and those that tell
    of the data (README, LICENSE, `.md`), are not looked at. Raises FileNotFoundError, or ValueError
    for a folder that holds anything else or no such file, for a pipe, and for a weight that is not
    a number above 0.
    """
    name, weight = str(argument), 1.0
    path, equals, text = name.rpartition("=")
    if equals and not Path(name).exists():
        weight = _weight(name, text)
        name = path
    place = Path(name)
    if place.is_dir():
        return Source(name, _files_in(place), weight)
    if not place.exists():
        raise FileNotFoundError(f"{place}: no such file")
    if not place.is_file():  # a pipe can be read only once, and by one rank
        raise ValueError(f"{place}: is no regular file: save it to one")
    return Source(name, [place], weight)


def _files_in(folder: Path) -> list[Path]:
    kinds = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        name, suffix = entry.name.lower(), entry.suffix.lower()
        if name.startswith("."):
            continue
        if suffix in SUFFIXES and entry.is_file():
            files.append(entry)
        elif entry.is_dir() or not (name.startswith(BESIDE_DATA) or suffix == ".md"):
            what = "a folder" if entry.is_dir() else f"no {kinds} file"
            raise ValueError(
                f"{entry}: is {what}, and would be left out of the data in {folder}: "
                "name the files to read one by one, or move it elsewhere"
            )
    if not files:
        raise ValueError(f"{folder}: the folder holds no {kinds} file")
    return files


def _weight(argument: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise FileNotFoundError(f"{argument}: no such file, and {text!r} is no weight") from None
    if not 0 < weight < math.inf:
        raise ValueError(f"{argument}: a weight must be a number above 0, not {text}")
    return weight


def _nothing(path: Path, refused: list[Refused]) -> str:
    if refused:
        return f"{path}: nothing is left: {len(refused)} lines are refused, the first: {refused[0]}"
    needed = {".txt": "text", ".npy": "token ids"}.get(path.suffix.lower(), "a JSON object a line")
    return f"{path}: the file is empty: it needs {needed}"
