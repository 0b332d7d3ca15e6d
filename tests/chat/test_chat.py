"""A target's folder becomes a Chat without torch; what is missing there is named with its cure."""

import json
from pathlib import Path

import pytest

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import RowError
from tiny_tokenizer import PLAIN_TEMPLATE, write_tiny_tokenizer

CONVERSATION = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3"}]


def _rewrite_config(folder: Path, **changes: object) -> Path:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_the_template_is_found_as_text_as_a_list_and_as_a_file_of_its_own(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    plain = open_chat(folder)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": PLAIN_TEMPLATE}]
    listed = open_chat(_rewrite_config(folder, chat_template=named))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}own file {{ eos_token }}")
    own = open_chat(_rewrite_config(folder, bos_token={"content": "<|im_start|>"}))

    assert plain.render(CONVERSATION, add_generation_prompt=False).count("<|im_end|>") == 2
    assert listed.template_hash == plain.template_hash != own.template_hash
    assert own.render(CONVERSATION, add_generation_prompt=False) == "<|im_start|>own file <|im_end|>"


def test_ids_decode_back_and_nothing_is_added(tmp_path: Path):
    chat = open_chat(write_tiny_tokenizer(tmp_path))
    text = chat.render(CONVERSATION, add_generation_prompt=True)
    assert chat.decode(chat.encode(text)) == text
    assert chat.decode_plain(chat.encode("<|im_start|>apple<|im_end|>")) == "apple"
    assert chat.encode("") == []


def test_a_truncation_saved_with_the_tokenizer_cuts_nothing(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    whole = open_chat(folder)
    whole.tokenizer.enable_truncation(max_length=2)
    whole.tokenizer.save(str(folder / "tokenizer.json"))
    assert len(open_chat(folder).encode("apple apple apple apple")) > 2


def test_stop_ids_are_the_eos_of_the_tokenizer_and_of_the_generation_configuration(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert open_chat(folder).stop_ids == {0, 2}


def test_a_folder_without_a_template_or_tokenizer_says_what_to_do(tmp_path: Path):
    with pytest.raises(InputError, match=r"no tokenizer\.json.*save_pretrained"):
        open_chat(tmp_path)
    folder = write_tiny_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"no chat template.*chat_template\.jinja"):
        open_chat(_rewrite_config(folder, chat_template=None))
    with pytest.raises(InputError, match="broken at line 2"):
        open_chat(_rewrite_config(folder, chat_template="a\n{% if %}"))


def test_what_the_template_refuses_is_a_row_error_with_its_words(tmp_path: Path):
    chat = open_chat(write_tiny_tokenizer(tmp_path, thinking=True))
    with pytest.raises(RowError, match="No user query found"):
        chat.render(CONVERSATION[1:], add_generation_prompt=False)
    with pytest.raises(RowError, match="no messages"):
        chat.render([], add_generation_prompt=False)
    with pytest.raises(RowError, match="not valid Unicode"):
        chat.encode("half an emoji \ud83d")


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    for attack in ("{{ ''.__class__.__mro__[1] }}", "{% set x = namespace(__class__=1) %}", "{{ messages.pop() }}"):
        chat = open_chat(_rewrite_config(folder, chat_template=attack))
        with pytest.raises(RowError, match="SecurityError"):
            chat.render(CONVERSATION, add_generation_prompt=False)


def test_tool_arguments_as_json_text_and_as_a_mapping_render_alike(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    chat = open_chat(_rewrite_config(folder, chat_template=template))
    texts = [
        chat.render(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}],
            add_generation_prompt=False,
        )
        for arguments in ({"a": "<é>"}, '{"a":"<é>"}')
    ]
    assert texts == ['{"a": "<é>"}'] * 2
    with pytest.raises(RowError, match="tool arguments are not JSON"):
        broken = [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]
        chat.render(broken, add_generation_prompt=False)


def test_what_is_nested_too_deep_is_the_row_s_fault_or_the_template_s_own(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    call = {"function": {"name": "f", "arguments": "[" * 5_000 + "]" * 5_000}}
    with pytest.raises(RowError, match="tool arguments are not JSON"):
        open_chat(folder).render([{"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
    endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    (folder / "chat_template.jinja").write_text(endless)
    with pytest.raises(RowError, match="RecursionError"):
        open_chat(folder).render([{"role": "user", "content": "a"}], add_generation_prompt=False)


@pytest.mark.parametrize("text", [b"{{ 10**2 }}\xff", b"{{ " + b"9" * 5_000 + b" }}"])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, text: bytes):
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_bytes(text)
    with pytest.raises(InputError, match=r"fetch it again|cannot be read"):
        open_chat(folder)
