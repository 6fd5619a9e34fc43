"""The chat tasks of the default run: dialogs that a program makes, and the tokenizer they need.

Every kind of task has more possible prompts than a run shows, and whether a prompt may be trained
on depends on the prompt alone, so a model that answers held-out prompts has learnt the task.

`python -m llama.finetune.tasks --build-tokenizer PATH` makes the SentencePiece model `tiny.model`;
`python -m llama.finetune.tasks` prints a few dialogs of each kind.

[Note: the tiny tokenizer]
Letters, digits and punctuation are one piece each, as a model can only reverse or sort what it sees
letter by letter, and 256 byte pieces take every other text, so that no prompt fails. The fixed
wording of the prompts and the chat tags are whole pieces (`user_defined_symbols`), which keeps a
dialog at 17 ids or fewer. A piece of wording that ends in a space must say so ("Reverse the word ",
not "Reverse"): it then cannot swallow the first letters of the word that follows. The space after
"[/INST]" belongs to the answer, so that an encoded prompt is a prefix of the encoded dialog.
"""

import argparse
import hashlib
import io
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sentencepiece

TOKENIZER_PATH = Path(__file__).with_name("tiny.model")
SPACE = "\u2581"  # how SentencePiece writes a space
WORD_LENGTH = 5
SMALLEST, LARGEST = 100, 999  # numbers of three digits
HELD_OUT_SHARE = 16  # one prompt in so many is kept for the score


class Kind(NamedTuple):
    """One kind of task: its name, the number of prompts it has, and how to draw one.

    `wording` are the fixed parts of its prompts, in order; `draw` fills the gaps between them.
    `weight` is its share of the training dialogs: what is slow to learn is shown more often.
    """

    name: str
    weight: int
    prompts: int
    wording: tuple[str, ...]
    draw: Callable[[random.Random], tuple[list[str], str]]

    def dialog(self, rng: random.Random) -> tuple[str, str]:
        """Draw a prompt and its answer."""
        gaps, answer = self.draw(rng)
        parts = [part for pair in zip(self.wording, [*gaps, ""], strict=True) for part in pair]
        return "".join(parts), answer


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=WORD_LENGTH))


def _draw_reverse(rng: random.Random) -> tuple[list[str], str]:
    word = _word(rng)
    return [word], word[::-1]


def _draw_sort(rng: random.Random) -> tuple[list[str], str]:
    word = _word(rng)
    return [word], "".join(sorted(word))


def _draw_capitals(rng: random.Random) -> tuple[list[str], str]:
    word = _word(rng)
    return [word], word.upper()


def _draw_add(rng: random.Random) -> tuple[list[str], str]:
    while True:
        first, second = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        if first + second <= LARGEST:
            return [str(first), str(second)], str(first + second)


def _draw_larger(rng: random.Random) -> tuple[list[str], str]:
    first, second = rng.sample(range(SMALLEST, LARGEST + 1), 2)
    return [str(first), str(second)], str(max(first, second))


_WORDS = len(string.ascii_lowercase) ** WORD_LENGTH
_NUMBERS = LARGEST - SMALLEST + 1
_PAIRS = _NUMBERS * (_NUMBERS - 1)
_SUMS = sum(LARGEST - SMALLEST - first + 1 for first in range(SMALLEST, LARGEST - SMALLEST + 1))

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("reverse", 2, _WORDS, ("Reverse the word ", "."), _draw_reverse),
        Kind("sort", 4, _WORDS, ("Sort the letters of ", "."), _draw_sort),
        Kind("capitals", 1, _WORDS, ("Write ", " in capital letters."), _draw_capitals),
        Kind("add", 4, _SUMS, ("What is ", " plus ", "?"), _draw_add),
        Kind("larger", 3, _PAIRS, ("Which is larger, ", " or ", "?"), _draw_larger),
    )
}


def is_held_out(prompt: str) -> bool:
    """Whether `prompt` belongs to the held-out split: a property of its text, the same everywhere.

    It hashes with SHA-256, as `hash()` of a string changes from process to process.
    """
    digest = hashlib.sha256(prompt.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def make_dialogs(count: int, seed: int, held_out: bool) -> list[tuple[str, list[dict[str, str]]]]:
    """Make `count` different dialogs of one split, the kinds in turn: (kind, messages) each.

    The same arguments give the same dialogs everywhere. Raises ValueError for a `count` that would
    take more than half of a kind's prompts in that split.
    """
    share = 1 / HELD_OUT_SHARE if held_out else 1 - 1 / HELD_OUT_SHARE
    limit = int(min(kind.prompts for kind in KINDS.values()) * share / 2) * len(KINDS)
    if not 0 <= count <= limit:
        split = "held-out" if held_out else "training"
        raise ValueError(f"cannot make {count} different {split} dialogs: ask for 0 to {limit}")
    rng = random.Random(f"{seed} {'held out' if held_out else 'train'}")
    kinds = [kind for kind in KINDS.values() for _ in range(1 if held_out else kind.weight)]
    dialogs: dict[str, tuple[str, list[dict[str, str]]]] = {}  # by prompt: none comes twice
    while len(dialogs) < count:
        kind = kinds[len(dialogs) % len(kinds)]
        prompt, answer = kind.dialog(rng)
        if is_held_out(prompt) == held_out:
            user = {"role": "user", "content": prompt}
            dialogs[prompt] = kind.name, [user, {"role": "assistant", "content": answer}]
    return list(dialogs.values())


def build_tokenizer(path: str | Path) -> None:
    """Write the tiny SentencePiece model to `path` (see [Note: the tiny tokenizer])."""
    first = {kind.wording[0] for kind in KINDS.values()}
    middle = {part for kind in KINDS.values() for part in kind.wording[1:-1]}
    last = {f"{kind.wording[-1]} [/INST]" for kind in KINDS.values()}
    wording = [" [INST] ", " [/INST]", *sorted(first), *sorted(middle), *sorted(last)]
    characters = [c if c != " " else SPACE for c in string.printable if c.isprintable()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(characters),
        model_writer=model,
        model_type="bpe",
        # Control pieces, bytes, wording, characters, and so no merge.
        vocab_size=3 + 256 + len(wording) + len(characters),
        user_defined_symbols=[part.replace(" ", SPACE) for part in wording],
        required_chars="".join(characters),
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    Path(path).write_bytes(model.getvalue())


def main() -> None:
    """Build the tokenizer, or print a few dialogs of each kind."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--build-tokenizer", metavar="PATH", help="write the tokenizer there")
    parser.add_argument("--seed", type=int, default=0, help="seed of the printed dialogs")
    arguments = parser.parse_args()
    if arguments.build_tokenizer:
        build_tokenizer(arguments.build_tokenizer)
        return
    for kind, (prompt, answer) in make_dialogs(4 * len(KINDS), arguments.seed, held_out=True):
        print(f"{kind:>9}  {prompt['content']} -> {answer['content']}")


if __name__ == "__main__":
    main()
