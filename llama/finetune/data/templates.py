"""How a record is put to the model: the texts of its segments, and where what is learnt begins.

A template is a name, and each kind of record has a way into it:

| template | `Text` | `Dialog`                        | `Instruction`               |
|----------|--------|---------------------------------|-----------------------------|
| auto     | plain  | llama2                          | alpaca                      |
| llama2   | plain  | Llama 2's chat format           | as a dialog of two messages |
| alpaca   | plain  | refused                         | Stanford Alpaca's prompt    |
| plain    | plain  | a line break before each answer | as a dialog of two messages |

A text is learnt whole, of everything else the answers and the EOS after them.
"""

from llama.chat import Segment, checked_texts, segments, tag_in
from llama.finetune.data.formats import Dialog, Instruction, Record, Text

TEMPLATES = ("auto", "llama2", "alpaca", "plain")

# Stanford Alpaca's prompts to the letter (github.com/tatsu-lab/stanford_alpaca, train.py): the
# answer follows the last colon at once, and EOS follows the answer.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_HEADERS = ("### Instruction:", "### Input:", "### Response:")


def segments_of(record: Record, template: str) -> list[Segment]:
    """The segments of a record to train on; ValueError, with the reason, where it has none.

    So for a dialog out of order or without an answer at its end, and for text that holds what marks
    the turns of a template: it would be read as the mark.
    """
    if isinstance(record, Text):
        check_untagged(record.text)
        return [Segment("", record.text, True)]
    if isinstance(record, Instruction):
        if template in ("auto", "alpaca"):
            return [_alpaca(record)]
        record = _as_dialog(record)
    elif template == "alpaca":
        raise ValueError(
            "the template 'alpaca' has one instruction and no turns: use 'llama2' or 'auto'"
        )
    turns = _plain(record) if template == "plain" else segments(record.messages)
    if not any(turn.closed for turn in turns):
        raise ValueError("nothing to learn: the dialog has no answer by the assistant")
    if not turns[-1].closed:
        raise ValueError("the dialog ends with a user's text: add its answer, or remove it")
    return turns


def check_untagged(text: str) -> None:
    """ValueError for a plain text that was written in the chat format by hand."""
    tag = tag_in(text)
    if tag is not None:
        raise ValueError(
            f"text holds the chat format's tag {tag}: write its turns as 'messages', "
            "so that only answers are learnt and every turn begins and ends as it should"
        )


def _alpaca(record: Instruction) -> Segment:
    if record.system.strip():
        raise ValueError("Alpaca's prompt has no place for 'system': use the template 'llama2'")
    for key, text in record._asdict().items():
        header = next((header for header in ALPACA_HEADERS if header in text), None)
        if header is not None:
            raise ValueError(f"{key!r} holds the template's own header {header!r}: remove it")
    with_input = bool(record.input.strip())
    form = ALPACA_WITH_INPUT if with_input else ALPACA_WITHOUT_INPUT
    prompt = form.format(instruction=record.instruction, input=record.input)
    return Segment(prompt, prompt + record.output, True)


def _as_dialog(record: Instruction) -> Dialog:
    user = "\n\n".join(text for text in (record.instruction, record.input) if text.strip())
    messages = [("system", record.system), ("user", user), ("assistant", record.output)]
    return Dialog([{"role": role, "content": content} for role, content in messages])


def _plain(record: Dialog) -> list[Segment]:
    """Each turn as its texts, a line each; the system's text is a line before the first."""
    system, texts = checked_texts(record.messages)
    turns: list[Segment] = []
    for user, answer in zip(texts[::2], [*texts[1::2], None], strict=False):
        prompt = f"{user}\n" if turns or not system else f"{system}\n{user}\n"
        turns.append(Segment(prompt, prompt + (answer or ""), answer is not None))
    return turns
