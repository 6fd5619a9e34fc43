"""Llama 2's chat format, against the ids its own tokenizer gives."""

import pytest

from llama.chat import Segment, encode_dialog, segments, tag_in

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


INSTRUCTION_1 = "[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\nHi [/INST]"
INSTRUCTION_2 = "[INST] How are you? [/INST]"
IDS_1 = """518 25580 29962 3532 14816 29903 6778 13 3492 526 263 8444 20255 29889 13 29966 829 14816
    29903 6778 13 13 18567 518 29914 25580 29962"""
ANSWER_1 = "15043 29991 29871"
IDS_2 = "518 25580 29962 1128 526 366 29973 518 29914 25580 29962"


class Llama2Segments:
    """Llama 2's own ids of the texts above, and of no other."""

    bos_id, eos_id = 1, 2

    def encode(self, text: str) -> list[int]:
        known = {
            INSTRUCTION_1: IDS_1,
            f"{INSTRUCTION_1} Hello! ": f"{IDS_1} {ANSWER_1}",
            INSTRUCTION_2: IDS_2,
        }
        return [int(token) for token in known[text].split()]


class Characters:
    """A token for each character; BOS reads `<` and EOS `>`."""

    bos_id, eos_id = ord("<"), ord(">")

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


class JoiningCharacters(Characters):
    """Has one token, `~`, for `] `, which so straddles the instruction and the answer."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("] ", "~"))


def learnt(ids: list[int], loss_mask: list[int]) -> str:
    return "".join(chr(i) for i, bit in zip(ids, loss_mask, strict=True) if bit)


def test_the_ids_are_those_of_llama_2_and_loss_is_on_answer_and_eos_only():
    messages = [SYSTEM, user("Hi"), assistant("Hello!"), user("How are you?")]
    ids, loss_mask = encode_dialog(Llama2Segments(), messages)
    expected = f"1 {IDS_1} {ANSWER_1} 2 1 {IDS_2}"
    assert ids == [int(token) for token in expected.split()]
    assert [i for i, bit in zip(ids, loss_mask, strict=True) if bit] == [15043, 29991, 29871, 2]
    assert loss_mask.index(1) == 28


def test_every_answer_of_a_dialog_is_learnt_and_texts_are_stripped():
    messages = [user(" a\n"), assistant(" b "), user("c"), assistant("d\n")]
    ids, loss_mask = encode_dialog(Characters(), messages)
    assert "".join(map(chr, ids)) == "<[INST] a [/INST] b ><[INST] c [/INST] d >"
    assert learnt(ids, loss_mask) == " b > d >"


def test_a_token_that_joins_instruction_and_answer_is_learnt():
    ids, loss_mask = encode_dialog(JoiningCharacters(), [user("a"), assistant("b")])
    assert "".join(map(chr, ids)) == "<[INST~a [/INST~b >"
    assert learnt(ids, loss_mask) == "~b >"


def test_an_open_turn_ends_after_the_instruction_and_bears_no_loss():
    ids, loss_mask = encode_dialog(Characters(), [user("a")])
    assert "".join(map(chr, ids)) == "<[INST] a [/INST]"
    assert sum(loss_mask) == 0


def test_a_blank_system_text_is_as_none():
    blank = {"role": "system", "content": "  "}
    assert encode_dialog(Characters(), [blank, user("a")]) == encode_dialog(
        Characters(), [user("a")]
    )


def test_the_segments_of_a_dialog_are_its_turns_as_texts_without_a_tokenizer():
    messages = [SYSTEM, user("Hi"), assistant("Hello!"), user("How are you?")]
    assert segments(messages) == [
        Segment(INSTRUCTION_1, f"{INSTRUCTION_1} Hello! ", True),
        Segment(INSTRUCTION_2, INSTRUCTION_2, False),
    ]


def test_a_tag_is_found_wherever_it_stands_in_a_text():
    assert tag_in("a [/INST] b") == "[/INST]"
    assert tag_in("a [ INST ] <s> b") is None


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
def test_text_that_holds_a_tag_is_refused(tag):
    with pytest.raises(ValueError, match=r"message 1 of 1: user text holds .* tag"):
        encode_dialog(Characters(), [user(f"hello {tag} there")])
    with pytest.raises(ValueError, match="message 1 of 2: system text holds"):
        encode_dialog(Characters(), [{"role": "system", "content": tag}, user("a")])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "needs at least one user message"),
        ([SYSTEM], "needs at least one user message"),
        ([assistant("a")], "message 1 of 1: role is 'assistant' where 'user' is due"),
        ([user("a"), user("b")], "message 2 of 2: role is 'user' where 'assistant' is due"),
        ([user("a"), SYSTEM], "message 2 of 2: role is 'system' where 'assistant' is due"),
        ([SYSTEM, SYSTEM], "message 2 of 2: role is 'system' where 'user' is due"),
        ([{"role": "tool", "content": "a"}], "message 1 of 1: unknown role 'tool'"),
        ([user("a"), assistant(" \n")], "message 2 of 2: assistant text is blank"),
        ([{"role": "user"}], "message 1 of 1: must be"),
        ([{"role": "user", "content": 3}], "content must be text, not int"),
        (["hello"], "message 1 of 1: must be"),
    ],
)
def test_a_dialog_out_of_order_names_the_message(messages, message):
    with pytest.raises(ValueError, match=message):
        encode_dialog(Characters(), messages)
