"""What a line of a JSONL file may be: a text, a dialog, or an instruction with its answer.

| keys                                            | known as | becomes       |
|-------------------------------------------------|----------|---------------|
| `text`                                          |          | `Text`        |
| `messages`: `[{role, content}]`, `system`       | OpenAI   | `Dialog`      |
| `conversations`: `[{from, value}]`, `system`    | ShareGPT | `Dialog`      |
| `instruction`, `input`, `output`, `system`      | Alpaca   | `Instruction` |

Other keys are left unread. Alpaca's own file also holds each record once more as `text`, which is
therefore no contradiction there; any other two of them are.
"""

import json
from typing import Any, NamedTuple

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names; ours stand for themselves
CALLS = ("tool_calls", "function_call")  # in a message: what it says beside its content
CALLED = ("tool", "function")  # roles
IN_TEXTS = "tell of the call and its result in the texts, or remove the dialog"


class Text(NamedTuple):
    """Text without turns."""

    text: str


class Dialog(NamedTuple):
    """Messages `{"role": ..., "content": ...}`, not checked any further."""

    messages: list[Any]


class Instruction(NamedTuple):
    """A task in Alpaca's form, unstripped; `input` is "" where there is none."""

    instruction: str
    input: str
    output: str
    system: str


Record = Text | Dialog | Instruction


def parse(line: bytes, first: bool) -> dict[str, Any]:
    """The JSON object on a line; ValueError for anything else, with the reason.

    Also for a key that is twice in an object, of which JSON's readers drop the first silently.
    """
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")  # editors may begin a file with a BOM
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
        raise ValueError(f"not UTF-8 text ({byte}): save the file as UTF-8") from None
    if text == "[":
        raise ValueError("a JSON array over many lines: write one object a line (jq -c '.[]')")
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice.append(next(key for key in keys if keys.count(key) > 1))
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:  # JSON can spell half of a surrogate pair, which is no character
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{half} is half of a surrogate pair, not a character") from None
    except (RecursionError, ValueError) as error:  # nested, or numbers, beyond Python's limits
        raise ValueError(f"malformed JSON: {error}") from None
    if twice:
        raise ValueError(f"the key {twice[0]!r} is there twice: keep one of them")
    if not isinstance(content, dict):
        raise ValueError(f"must be a JSON object, not {_json_type(content)}")
    return content


def record_of(content: dict[str, Any]) -> Record:
    """Which of the formats an object is in; ValueError, with the keys found, for none or several.

    Also for a value of the wrong type, a blank text, and one that this project does not read but
    that says something: `history`, `tools`, a message's `tool_calls` or `weight`.
    """
    kinds = [kind for kind in _READERS if kind in content]
    if kinds == ["text", "instruction"]:
        kinds = ["instruction"]
    if len(kinds) != 1:
        raise ValueError(f"needs one of {_keys(_READERS)}; its keys: {_keys(content)}")
    return _READERS[kinds[0]](content)


def _text(content: dict[str, Any]) -> Text:
    text = _string(content, "text")
    if not text.strip():
        raise ValueError("'text' is blank: remove the line")
    return Text(text)


def _messages(content: dict[str, Any]) -> Dialog:
    messages = _list(content, "messages")
    return _dialog(content, messages, messages, "message")


def _conversations(content: dict[str, Any]) -> Dialog:
    turns = _list(content, "conversations")
    messages = [
        _message(turn, f"turn {number} of {len(turns)}")
        for number, turn in enumerate(turns, start=1)
    ]
    return _dialog(content, messages, turns, "turn")


def _dialog(content: dict[str, Any], messages: list[Any], written: list[Any], name: str) -> Dialog:
    """Messages with the `system` beside them; `written` are the messages as they stand there."""
    system = _string(content, "system", "")
    for number, (message, original) in enumerate(zip(messages, written, strict=True), start=1):
        if not isinstance(message, dict):
            continue  # refused with the other checks of messages
        where = f"{name} {number} of {len(messages)}"
        _check_plain(original, message.get("role"), where)
        if system.strip() and message.get("role") == "system":
            raise ValueError(f"{where}: is a system text, as 'system' is: keep one of them")
    if system.strip():
        messages = [{"role": "system", "content": system}, *messages]
    return Dialog(messages)


def _check_plain(message: dict[str, Any], role: Any, where: str) -> None:
    """ValueError for what says more than a role and a text, and would be lost."""
    for key in CALLS:
        if message.get(key):
            raise ValueError(f"{where}: {key!r} is not read here: {IN_TEXTS}")
    if role in CALLED:
        raise ValueError(f"{where}: the role {role!r} is not read here: {IN_TEXTS}")
    weight = message.get("weight")
    if weight is not None and weight != 1:
        raise ValueError(
            f"{where}: a 'weight' of {weight!r} is not read here, as every answer is learnt alike: "
            "remove it, or end the dialog before an answer that is not to be learnt"
        )


def _message(turn: Any, where: str) -> dict[str, Any]:
    """A turn, in ShareGPT's keys or OpenAI's, as a message whose values are not checked."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: must be an object, not {_json_type(turn)}")
    if {"from", "value"} <= turn.keys():
        role = turn["from"]
        known = ROLES.get(role, role) if isinstance(role, str) else role
        return {"role": known, "content": turn["value"]}
    if {"role", "content"} <= turn.keys():
        return turn
    raise ValueError(f"{where}: needs 'from' and 'value'; its keys: {_keys(turn)}")


def _instruction(content: dict[str, Any]) -> Instruction:
    if "output" not in content:
        raise ValueError(f"an 'instruction' needs an 'output'; its keys: {_keys(content)}")
    if content.get("history"):
        raise ValueError("'history' is not read here: write the turns as 'messages'")
    optional = {key: _string(content, key, "") for key in ("input", "system")}
    record = Instruction(
        _string(content, "instruction"), output=_string(content, "output"), **optional
    )
    for key in ("instruction", "output"):
        if not getattr(record, key).strip():
            raise ValueError(f"{key!r} is blank: remove the line")
    return record


_READERS = {
    "text": _text,
    "messages": _messages,
    "conversations": _conversations,
    "instruction": _instruction,
}


def _string(content: dict[str, Any], key: str, missing: str | None = None) -> str:
    value = content.get(key)
    if value is None and missing is not None:
        return missing
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a string, not {_json_type(value)}")
    return value


def _list(content: dict[str, Any], key: str) -> list[Any]:
    value = content[key]
    if not isinstance(value, list):
        raise ValueError(f"{key!r} must be a list, not {_json_type(value)}")
    for tools in ("tools", "functions"):
        if content.get(tools):
            raise ValueError(f"{tools!r} is not read here: tell of them in the system's text")
    return value


def _keys(content: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in content) or "none"


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
