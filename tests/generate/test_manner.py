"""Whether a target is to think is settled before the first prompt, and refused where its template cannot be told."""

from pathlib import Path
from typing import Any

import pytest

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.errors import RecipeError
from draftmill.generate.manner import wanted_thinking
from draftmill.settings.generate import GenerateSettings
from tiny_tokenizer import write_tiny_tokenizer

DEAF = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPENING = DEAF + "<think>\n"
LISTENING = DEAF + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def chat_with(template: str, folder: Path) -> Chat:
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return open_chat(folder)


def thinking(setting: str, **more: Any) -> GenerateSettings:
    return GenerateSettings.model_validate(
        {"input": ("p.jsonl",), "output": ("o",), "target": "T", "thinking": setting, **more}
    )


@pytest.mark.parametrize(
    ("template", "setting", "wanted"),
    [
        (DEAF, "default", None),
        (DEAF, "off", False),
        (OPENING, "default", True),
        (OPENING, "on", True),
        (LISTENING, "default", None),
        (LISTENING, "on", True),
        (LISTENING, "off", False),
    ],
)
def test_settings_and_template_together_say_whether_the_target_thinks(
    template: str, setting: str, wanted: bool | None, tmp_path: Path
) -> None:
    assert wanted_thinking(chat_with(template, tmp_path), thinking(setting)) is wanted


def test_a_switch_that_the_template_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="leave --thinking out"):
        wanted_thinking(chat_with(DEAF, tmp_path), thinking("on"))
    with pytest.raises(RecipeError, match="does not know enable_thinking"):
        wanted_thinking(chat_with(OPENING, tmp_path), thinking("off"))


def test_an_engine_is_asked_itself_where_the_template_does_not_tell(tmp_path: Path) -> None:
    assert wanted_thinking(chat_with(DEAF, tmp_path), thinking("on", endpoint=("http://host/v1",))) is True
