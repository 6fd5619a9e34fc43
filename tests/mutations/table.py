"""The table of mutations: text files in `lines/`, one for each file of the engine.

A file begins with a line about it. Each mutation is a paragraph:

    what it breaks
    @ Unit.adopt                       the function, where the file has the line twice
    - the line as it stands
    + what stands there instead
    = tests/test_state.py::test_name   the test that tells, which is tried first

[Note: what is in the table]
Each line that does something is broken in the ways in which somebody might get it wrong: a
condition turned, a wait or a free dropped, a rank, dtype or bound that is off. Not there: lines
that only a GPU runs, and changes that no caller could see, such as a cache of what is made again.
"""

from __future__ import annotations

from pathlib import Path

from .mutation import Mutation

LINES = Path(__file__).with_name("lines")


def read(path: Path) -> dict[Mutation, str | None]:
    """The mutations of one text file, and for each the test that tells, if one is noted."""
    engine_file = Path("minifsdp") / path.relative_to(LINES).with_suffix(".py")
    found: dict[Mutation, str | None] = {}
    _, *paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
    for paragraph in paragraphs:
        says, *rest = paragraph.split("\n")
        fields = {line[:2]: line[2:] for line in rest}
        if {"- ", "+ "} - fields.keys() or fields.keys() - {"@ ", "- ", "+ ", "= "}:
            raise ValueError(f"{path}: not a mutation, with a '- ' and a '+ ' line:\n{paragraph}")
        if len(fields) != len(rest):
            raise ValueError(f"{path}: a mutation has two lines of one kind:\n{paragraph}")
        mutation = Mutation(
            str(engine_file), fields["- "], fields["+ "], says, fields.get("@ ", "")
        )
        if mutation in found:
            raise ValueError(f"{path}: twice in the table: {mutation}")
        found[mutation] = fields.get("= ")
    return found


def note(mutation: Mutation, test: str) -> None:
    """Write into the table which test tells of `mutation`."""
    path = LINES / Path(mutation.file).relative_to("minifsdp").with_suffix(".txt")
    about, _, _ = path.read_text(encoding="utf-8").partition("\n\n")
    table = read(path) | {mutation: test}
    paragraphs = [about]
    for each, its_test in table.items():
        lines = [each.says, f"@ {each.within}" if each.within else ""]
        lines += [f"- {each.line}", f"+ {each.becomes}", f"= {its_test}" if its_test else ""]
        paragraphs.append("\n".join(line for line in lines if line))
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


MUTATIONS: dict[Mutation, str | None] = {
    mutation: test for path in sorted(LINES.rglob("*.txt")) for mutation, test in read(path).items()
}
