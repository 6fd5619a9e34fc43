"""A chat in a terminal, or line by line from a pipe, on one process or on all ranks of a group."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TextIO

from torch import nn

from llama.generate.conversation import Conversation
from llama.generate.decode import Refusal, ranks_and_device
from llama.generate.reply import Replier, Settings
from llama.generate.together import Interrupts, Ranks, Word
from llama.tokenizer import Tokenizer

COMMANDS = "/reset forgets the dialog, /system TEXT sets the system text, /quit or Ctrl-D ends"
_COMMAND = re.compile(r"/[a-z]+(?=\s|$)")  # and not /etc/hosts, which one may ask about
PROMPT = "> "


class Terminal:
    """Where lines come from, answers go to, and all else is told; by default the standard streams.

    A `source` that is no terminal is read without prompts.
    """

    def __init__(
        self,
        source: TextIO | None = None,
        answers: TextIO | None = None,
        notes: TextIO | None = None,
    ) -> None:
        self._source, self._answers = source or sys.stdin, answers or sys.stdout
        self._notes = notes or sys.stderr
        self.interactive = self._source.isatty()

    def read(self) -> str | None:
        """The next line; None at the end. Ctrl-C in a terminal gives up the line only."""
        while True:
            try:
                if self.interactive and self._source is sys.stdin:
                    return input(PROMPT)  # which knows of line editing
                if self.interactive:
                    self.write(PROMPT)
                return self._source.readline() or None
            except EOFError:
                self.write("\n")
                return None
            except KeyboardInterrupt:
                self.give_up_line()

    def give_up_line(self) -> None:
        """Begin another line after Ctrl-C; without a terminal it is KeyboardInterrupt after all."""
        if not self.interactive:
            raise KeyboardInterrupt
        self.write("\n")
        self.note("/quit or Ctrl-D ends")

    def write(self, text: str) -> None:
        """A piece of an answer."""
        self._answers.write(text)
        self._answers.flush()

    def note(self, text: str) -> None:
        """A line that is not an answer."""
        print(text, file=self._notes, flush=True)


def converse(
    model: nn.Module,
    tokenizer: Tokenizer,
    settings: Settings,
    terminal: Terminal | None = None,
) -> None:
    """Chat until the input ends. Where there is a process group, all its ranks call this: rank 0
    reads and writes, the others take part in its forwards (see [Note: waiting for a person]).

    `model` is as `generate` takes it. ValueError, on every rank, for settings that do not fit it.
    """
    if settings.raw:
        raise ValueError("a chat has its format: raw is for prompts given beforehand")
    _, device = ranks_and_device(model)
    ranks = Ranks(device)
    replier = Replier(model, tokenizer, settings)
    max_seq_len = model.config.max_seq_len
    # A quarter of the sequence: an answer cut off for an old turn's sake is of little use.
    reserve = max(1, min(settings.max_new_tokens, max_seq_len // 4))
    conversation = Conversation(tokenizer, max_seq_len, settings.system, reserve)
    if ranks.rank == 0:
        _Host(ranks, replier, conversation, terminal or Terminal()).run()
        return
    with Interrupts():  # a terminal sends Ctrl-C to all; it is rank 0 that heeds it
        while (word := ranks.listen()) is not Word.END:
            if word is Word.REPLY:
                with contextlib.suppress(Refusal):  # rank 0 says why
                    replier.accompany()


class _Host:
    """Rank 0's side of a chat."""

    def __init__(
        self, ranks: Ranks, replier: Replier, conversation: Conversation, terminal: Terminal
    ) -> None:
        self._ranks, self._replier = ranks, replier
        self._conversation, self._terminal = conversation, terminal
        self._replying = False  # the others are in forwards, where no word reaches them

    def run(self) -> None:
        """Read and answer until the input ends, and tell the other ranks."""
        if self._terminal.interactive:
            self._terminal.note(COMMANDS)
        if self._ranks.world_size == 1:
            self._run()
            return
        # Where others listen, Ctrl-C must not come between two words: it is noted, and asked for.
        with Interrupts(), contextlib.suppress(KeyboardInterrupt):
            self._run()

    def _run(self) -> None:
        try:
            while (line := self._ranks.read(self._terminal.read, self._interrupted)) is not None:
                text = line.strip()
                command = _COMMAND.match(text)
                if command and command[0] == "/quit":
                    return
                try:
                    if command:
                        self._command(command[0], text[command.end() :])
                    elif text:
                        self._answer(text)
                except ValueError as refusal:
                    self._terminal.note(str(refusal))
                except KeyboardInterrupt:  # a second one, in a reply that does not end
                    if self._ranks.world_size > 1:
                        raise
                    self._terminal.give_up_line()
        finally:
            if not self._replying:
                self._ranks.say(Word.END)

    def _command(self, name: str, rest: str) -> None:
        if name == "/reset":
            self._conversation.reset()
        elif name == "/system":
            self._conversation.instruct(rest)
        else:
            raise ValueError(f"{name} is no command: {COMMANDS}")

    def _answer(self, text: str) -> None:
        """Put `text` to the model and write what it says, until it ends or Ctrl-C comes."""
        prompt, dropped = self._conversation.ask(text)
        if dropped:
            turns = "the oldest turn is" if dropped == 1 else f"the {dropped} oldest turns are"
            self._terminal.note(f"{turns} forgotten, to keep to the length that the model reads")
        failures: list[Exception] = []
        with Interrupts(insistently=self._ranks.world_size == 1) as interrupts:

            def show(piece: str) -> bool:
                try:
                    self._terminal.write(piece)
                except Exception as failure:  # raised once all ranks are out of their forwards
                    failures.append(failure)
                return bool(failures) or interrupts.noted

            self._ranks.say(Word.REPLY)
            self._replying = True
            try:
                answer = self._replier.reply(prompt, show)
            except Refusal:
                self._replying = False
                raise
            self._replying = False
        if failures:
            raise failures[0]
        self._terminal.write("\n")
        if interrupts.noted and self._ranks.launched:
            raise KeyboardInterrupt
        try:
            self._conversation.answer(answer)
        except ValueError as reason:
            self._terminal.note(f"this turn is not kept for the next ones: {reason}")

    def _interrupted(self) -> None:
        """Ctrl-C while another thread reads."""
        if self._ranks.launched:
            raise KeyboardInterrupt
        self._terminal.give_up_line()
        self._terminal.write(PROMPT)
