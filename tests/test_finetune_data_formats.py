"""Claims about the formats of a JSONL line and the texts that the templates make of them."""

import json
from itertools import chain

import pytest

from llama.chat import Segment
from llama.finetune.data import Example, Refused, load, show
from llama.finetune.data.formats import record_of
from llama.finetune.data.templates import segments_of
from llama.finetune.tasks import TOKENIZER_PATH
from llama.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TOKENIZER_PATH)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
TURNS = [{"from": NAMES[m["role"]], "value": m["content"]} for m in MESSAGES]
TASK = {"instruction": "Name a colour.", "input": "of the sky", "output": "Blue."}
LLAMA2 = [
    Segment(
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]",
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! ",
        True,
    ),
    Segment("[INST] Bye [/INST]", "[INST] Bye [/INST] See you. ", True),
]


def segments(content, template="auto"):
    return segments_of(record_of(content), template)


def task(**changes):
    return {**TASK, **changes}


def said(at, **changes):
    """The dialog with other values in one message."""
    return {"messages": [*MESSAGES[:at], {**MESSAGES[at], **changes}, *MESSAGES[at + 1 :]]}


# ---- Formats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        {"messages": MESSAGES},
        {"conversations": TURNS},
        {"conversations": TURNS[1:], "system": "Be brief."},
        {"messages": MESSAGES[1:], "system": "Be brief."},
        {"messages": MESSAGES, "system": " "},
        {"messages": MESSAGES, "system": None},
        {"messages": [{**m, "weight": 1.0, "tool_calls": None, "name": "x"} for m in MESSAGES]},
        {"conversations": TURNS, "id": "a_0", "source": "x", "tools": []},
        {"conversations": [{**turn, "markdown": None, "text": "x"} for turn in TURNS]},
        {"conversations": MESSAGES},
        {
            "conversations": [
                {"from": m["role"], "value": m["content"], "weight": 1} for m in MESSAGES
            ]
        },
    ],
)
def test_sharegpt_in_all_its_spellings_is_the_dialog_that_messages_are(content):
    assert segments(content) == LLAMA2


def test_alpacas_own_copy_of_the_record_as_text_is_no_contradiction():
    assert segments(task(text="Below is ...")) == segments(TASK)


@pytest.mark.parametrize("nothing", ["", None, "  "])
def test_an_input_that_is_blank_or_null_is_as_none(nothing):
    without = {key: value for key, value in TASK.items() if key != "input"}
    assert segments(task(input=nothing)) == segments(without)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"text": "a", "messages": MESSAGES}, "its keys: 'text', 'messages'"),
        ({"conversations": TURNS, "text": "a"}, "its keys: 'conversations', 'text'"),
        ({"conversations": TURNS, **TASK}, "its keys: 'conversations', 'instruction', 'input'"),
        ({"prompt": "a", "response": "b"}, "'instruction'; its keys: 'prompt', 'response'"),
        ({"instruction": "a", "response": "b"}, "needs an 'output'; its keys: 'instruction', 'res"),
        (task(output=" "), "'output' is blank"),
        (task(instruction=""), "'instruction' is blank"),
        (task(output=None), "'output' must be a string, not null"),
        (task(input=3), "'input' must be a string, not a number"),
        (task(history=[["a", "b"]]), "'history' is not read here: write the turns as 'messages'"),
        ({"conversations": TURNS, "tools": "[{}]"}, "'tools' is not read here"),
        ({"messages": MESSAGES, "functions": [{}]}, "'functions' is not read here"),
        ({"messages": MESSAGES, "system": "a"}, "message 1 of 5: is a system text, as 'system'"),
        ({"conversations": TURNS, "system": "a"}, "turn 1 of 5: is a system text, as 'system' is"),
        ({"messages": MESSAGES, "system": ["a"]}, "'system' must be a string, not a list"),
        (said(4, weight=0), "message 5 of 5: a 'weight' of 0 is not read here"),
        (said(1, weight=0.5), "message 2 of 5: a 'weight' of 0.5 is not read here"),
        (
            said(2, content=None, tool_calls=[{}]),
            "message 3 of 5: 'tool_calls' is not read here: tell of the call and its result",
        ),
        (said(2, function_call={"name": "f"}), "message 3 of 5: 'function_call' is not read here"),
        (said(3, role="tool"), "message 4 of 5: the role 'tool' is not read here: tell of the"),
        (said(3, role="function"), "message 4 of 5: the role 'function' is not read here"),
        (
            {"conversations": [*TURNS, {"from": "tool", "value": "a"}]},
            "turn 6 of 6: the role 'tool'",
        ),
        (
            {"conversations": [*TURNS[:4], {**TURNS[4], "weight": 0}]},
            "turn 5 of 5: a 'weight' of 0",
        ),
        ({"conversations": {}}, "'conversations' must be a list, not an object"),
        (
            {"conversations": [*TURNS, {"from": "gpt"}]},
            "turn 6 of 6: needs 'from' and 'value'; its k",
        ),
        ({"conversations": [*TURNS, {}]}, "turn 6 of 6: needs 'from' and 'value'; its keys: none"),
        ({"conversations": ["Hi"]}, "turn 1 of 1: must be an object, not a string"),
        ({"conversations": TURNS[2:]}, "message 1 of 3: role is 'assistant' where 'user' is due"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "unknown role 'observation'"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "unknown role"),
        ({"messages": MESSAGES[:2]}, "nothing to learn: the dialog has no answer"),
        ({"messages": MESSAGES[:4]}, "ends with a user's text: add its answer, or remove it"),
        ({"text": "[INST] Hi [/INST] Hello"}, r"tag [INST]: write its turns as 'messages'"),
    ],
)
def test_what_is_ambiguous_unknown_or_unfinished_is_refused_with_what_was_found(content, reason):
    with pytest.raises(ValueError) as error:
        segments(content)
    assert reason in str(error.value)


# ---- Templates ------------------------------------------------------------------------------


def test_a_text_is_learnt_whole_under_every_template():
    for template in ("auto", "llama2", "alpaca", "plain"):
        assert segments({"text": " a\n"}, template) == [Segment("", " a\n", True)]


def test_alpacas_prompt_is_stanfords_to_the_letter_and_the_answer_follows_its_colon():
    (with_input,) = segments(TASK)
    assert with_input.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName a colour.\n\n### Input:\nof the sky\n\n### Response:"
    )
    assert with_input.text == with_input.prompt + "Blue."
    assert with_input.closed
    (without,) = segments(task(input="", output="Blue {input}.\n"), "alpaca")
    assert without.prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nName a colour.\n\n### Response:"
    )
    assert without.text == without.prompt + "Blue {input}.\n"


def test_an_instruction_under_llama2_is_a_users_text_with_the_input_below_it():
    assert segments(TASK, "llama2") == [
        Segment(
            "[INST] Name a colour.\n\nof the sky [/INST]",
            "[INST] Name a colour.\n\nof the sky [/INST] Blue. ",
            True,
        )
    ]
    (with_system,) = segments(task(input="", system="Be brief."), "llama2")
    assert with_system.prompt == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nName a colour. [/INST]"


def test_plain_puts_a_line_break_where_the_tags_would_be():
    assert segments({"messages": MESSAGES}, "plain") == [
        Segment("Be brief.\nHi\n", "Be brief.\nHi\nHello!", True),
        Segment("Bye\n", "Bye\nSee you.", True),
    ]
    (turn,) = segments(TASK, "plain")
    assert turn == Segment("Name a colour.\n\nof the sky\n", turn.prompt + "Blue.", True)


@pytest.mark.parametrize("header", ["### Instruction:", "### Input:", "### Response:"])
@pytest.mark.parametrize("key", ["instruction", "input", "output"])
def test_alpacas_headers_within_a_field_are_refused_by_key(header, key):
    content = task(**{key: f"a\n{header}\nb"})
    with pytest.raises(ValueError, match=f"'{key}' holds the template's own header '{header}'"):
        segments(content)
    assert segments(content, "llama2")


def test_what_a_template_has_no_place_for_is_refused():
    with pytest.raises(ValueError, match="'alpaca' has one instruction and no turns: use 'llama2'"):
        segments({"messages": MESSAGES}, "alpaca")
    with pytest.raises(ValueError, match="no place for 'system': use the template 'llama2'"):
        segments(task(system="Be brief."))
    for template in ("auto", "llama2", "plain"):
        with pytest.raises(ValueError, match="holds the chat format's tag"):
            segments({"messages": [{"role": "user", "content": "[INST]"}]}, template)


# ---- Together -------------------------------------------------------------------------------


def test_only_output_and_end_of_an_alpaca_record_are_learnt(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(TASK))
    (example,) = load([path], TOKENIZER, 512)
    learnt = [int(i) for i, mask in zip(*example, strict=True) if mask]
    assert TOKENIZER.decode(learnt) == "Blue."
    assert learnt[-1] == TOKENIZER.eos_id
    given = [int(i) for i, mask in zip(*example, strict=True) if not mask]
    assert given == TOKENIZER.encode(segments(TASK)[0].prompt, bos=True)


def test_the_first_bad_line_is_raised_with_how_many_follow_or_all_are_kept_and_skipped(tmp_path):
    lines = [json.dumps({"messages": MESSAGES}), "{", json.dumps(TASK), "[]", json.dumps({"a": 1})]
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(ValueError) as error:
        load([tmp_path], TOKENIZER, 512)
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}:2: malformed JSON")
    assert str(error.value).endswith("(lines refused after it: 5)")
    corpus = load([tmp_path], TOKENIZER, 512, on_bad_line="skip")
    assert [(refused.path, refused.line) for refused in corpus.refused] == [
        (str(tmp_path / name), line) for name in ("a.jsonl", "b.jsonl") for line in (2, 4, 5)
    ]
    assert str(corpus.refused[1]) == f"{tmp_path / 'a.jsonl'}:4: must be a JSON object, not a list"
    assert [corpus.place(i) for i in range(len(corpus))] == [
        f"{tmp_path / name}:{line}" for name in ("a.jsonl", "b.jsonl") for line in (1, 3)
    ]


def test_dialogs_too_long_are_refused_in_the_order_of_the_lines_and_texts_are_cut(tmp_path):
    path = tmp_path / "data.jsonl"
    contents = [{"text": "ab" * 20}, {"messages": MESSAGES}, {}, TASK, {"text": "ab"}]
    path.write_text("\n".join(json.dumps(content) for content in contents))
    corpus = load([path], TOKENIZER, 20, on_bad_line="skip")
    assert [refused.line for refused in corpus.refused] == [2, 3, 4]
    assert "more than the sequence length 20: raise --seq-len" in corpus.refused[0].reason
    assert [corpus.place(i) for i in range(len(corpus))] == [f"{path}:1"] * 3 + [f"{path}:5"]


def test_a_file_that_yields_nothing_is_an_error_whatever_is_done_with_bad_lines(tmp_path):
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_text(json.dumps({"text": "a"}))
    bad.write_text("{}\n{}\n")
    with pytest.raises(ValueError, match=r"b.jsonl: nothing is left: 2 lines are .*:1: needs"):
        load([tmp_path], TOKENIZER, 64, on_bad_line="skip")
    with pytest.raises(ValueError, match=r"b.jsonl:1: needs .* \(lines refused after it: 1\)"):
        load([tmp_path], TOKENIZER, 64)
    bad.write_text("\n")
    for mode in ("skip", "error"):
        with pytest.raises(ValueError, match=r"b.jsonl: the file is empty"):
            load([tmp_path], TOKENIZER, 64, on_bad_line=mode)


def test_a_json_array_over_many_lines_is_refused_with_how_to_make_lines_of_it(tmp_path):
    path = tmp_path / "alpaca_data.json"
    path.write_text(json.dumps([TASK], indent=4))
    with pytest.raises(ValueError, match=r"json:1: a JSON array over many lines: .*jq -c"):
        load([path], TOKENIZER, 64)


def test_a_sample_shows_pieces_with_ids_and_which_are_learnt(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [MESSAGES[1], MESSAGES[2] | {"content": "a"}]}))
    (example,) = load([path], TOKENIZER, 64)
    shown = show(example, TOKENIZER)
    title, *lines = shown.splitlines()
    assert title == f"{len(example.ids)} tokens, 4 of them learnt"
    assert all(len(line) <= 60 for line in lines)
    start = next(at for at, line in enumerate(lines) if line.startswith("learnt | "))
    assert lines[0].startswith("given  | <s>:1 ")
    pieces = [line.partition(" | ")[2].split() for line in lines]
    named = [f"{TOKENIZER.piece(i)}:{i}" for i in example.ids.tolist()]
    assert list(chain(*pieces)) == named
    assert len(list(chain(*pieces[start:]))) == 4
    assert shown.replace("\n", "").isprintable()


def test_a_sample_holds_nothing_that_a_terminal_would_obey():
    class Escapes:
        def piece(self, i: int) -> str:
            return "\x1b[2J \n"

    shown = show(Example([1, 2], [0, 1]), Escapes())
    assert shown.splitlines()[1:] == [
        "given  | \\x1b[2J\u2581\\n:1",
        "learnt | \\x1b[2J\u2581\\n:2",
    ]


def test_a_refused_file_has_no_line():
    assert str(Refused("a.npy", 0, "no")) == "a.npy: no"
