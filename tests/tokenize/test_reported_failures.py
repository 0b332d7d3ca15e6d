"""What public pipelines of this kind got wrong with templates, masks and cuts does not happen here.

Each test names the threads that reported the failure. Qwen3.6's own template, a tiny tokenizer.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from completions import samples_of
from draftmill.chat.chat import Chat, open_chat
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.rows import RowBatch, RowMaker, RowMakerSpec
from draftmill.tokenize.samples import Sample
from tiny_tokenizer import PLAIN_TEMPLATE, write_tiny_tokenizer
from trl_templates import needs_trl, write_trl_folder

pytestmark = needs_trl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trl_folder(tmp_path_factory.mktemp("qwen"), "qwen3_6")


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return open_chat(folder)


@pytest.fixture(scope="module")
def maker(folder: Path) -> RowMaker:
    return RowMaker(RowMakerSpec(folder, "faithful", 1000))


def _make(maker: RowMaker, *rows: Any) -> RowBatch:
    return maker.make([(i, json.dumps(row).encode()) for i, row in enumerate(rows)], "a.jsonl")


def _one(maker: RowMaker, *messages: dict[str, Any], **more: Any) -> Sample:
    (sample,) = samples_of(_make(maker, {"id": "r", "messages": list(messages), **more}))
    return sample


def _supervised(chat: Chat, sample: Sample) -> str:
    return chat.decode(sample.input_ids[sample.loss_mask].tolist())


def _user(content: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(content: str | None = "ok", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_a_template_without_generation_tags_is_masked_all_the_same(tmp_path: Path):
    """huggingface/transformers#34172, marin-community/marin#7237; all ones: NVIDIA-NeMo/Megatron-Bridge#3359, #3927."""
    folder = write_tiny_tokenizer(tmp_path)
    assert "generation %}" not in PLAIN_TEMPLATE
    sample = _one(RowMaker(RowMakerSpec(folder, "faithful", 100)), _user("apple"), _answer("red"))
    assert 0 < sample.loss_mask.sum() < len(sample.loss_mask)
    assert _supervised(open_chat(folder), sample) == "red<|im_end|>"


def test_as_many_rows_come_out_as_went_in_less_the_listed_ones(maker: RowMaker):
    """NVIDIA/Model-Optimizer#2172, sgl-project/SpecForge#555, #777, #216: one odd row aborts or empties the set."""
    odd = [
        {"messages": []},
        {"messages": [{"role": "system", "content": "S"}]},
        {"messages": [_answer()]},
        {"messages": [_user(), {"role": "model", "content": "?"}, _answer()]},
        {"messages": [{"role": "user", "content": ["parts"]}, _answer()]},
        {"messages": [_user(), _answer(None)]},
        {"messages": [_user("a"), _user("b"), _answer()]},
    ]
    good = [{"id": f"r{i}", "messages": [_user(f"hi {i}"), _answer()]} for i in range(500)]
    batch = _make(maker, *good, *odd)
    assert len(batch.row_ids) == 507 == len(batch.sample_ids) + len(batch.dropped)
    assert len(batch.sample_ids) == 502, "two users in a row, and an empty answer behind an empty thought, are no fault"
    assert len({drop.reason for drop in batch.dropped}) == 5


def test_reasoning_before_a_lone_closing_tag_is_reasoning(maker: RowMaker):
    """huggingface/trl#6361, #6363: an empty block, the reasoning, and an orphan tag."""
    inline = _one(maker, _user(), _answer("why\n</think>\n\n42"))
    assert inline.input_ids.tolist() == _one(maker, _user(), _answer("42", reasoning_content="why")).input_ids.tolist()


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_every_spelling_of_reasoning_gives_the_same_ids(maker: RowMaker, key: str):
    """huggingface/transformers#44301."""
    wanted = _one(maker, _user(), _answer(reasoning_content="why"))
    assert _one(maker, _user(), _answer(**{key: "why"})).input_ids.tolist() == wanted.input_ids.tolist()


def test_full_and_empty_reasoning_are_both_found(maker: RowMaker, chat: Chat):
    """unslothai/unsloth#6919: the two line ends of an empty block are one token."""
    assert len(chat.encode("\n\n")) == 1
    assert _supervised(chat, _one(maker, _user(), _answer(reasoning_content="why"))) == "why\n</think>\n\nok<|im_end|>"
    assert _supervised(chat, _one(maker, _user(), _answer(reasoning_content=""))) == "</think>\n\nok<|im_end|>"


def test_the_block_that_the_prompt_closes_is_not_trained(maker: RowMaker, chat: Chat):
    """NVIDIA-NeMo/Automodel#3738, #3739."""
    asked = {"chat_template_kwargs": {"enable_thinking": False}}
    assert _supervised(chat, _one(maker, _user(), _answer(), sampling=asked)) == "ok<|im_end|>"


def test_thinking_of_earlier_turns_follows_the_switch_that_serving_had(maker: RowMaker, chat: Chat):
    """modelscope/ms-swift#4939, hiyouga/LlamaFactory#10773."""
    turns = [_user(), _answer("a", reasoning_content="t1"), _user(), _answer("b", reasoning_content="t2")]
    dropped, kept = (
        _one(maker, *turns, sampling={"chat_template_kwargs": k}) for k in ({}, {"preserve_thinking": True})
    )
    assert _supervised(chat, dropped) == "t2\n</think>\n\nb<|im_end|>"
    assert "t1" not in chat.decode(dropped.input_ids.tolist())
    assert _supervised(chat, kept) == "t1\n</think>\n\na<|im_end|>t2\n</think>\n\nb<|im_end|>"


def test_a_tool_chain_is_rendered_once(maker: RowMaker, chat: Chat):
    """verl-project/verl#7807, THUDM/slime#330; arguments as text: QwenLM/Qwen3#1894, oumi-ai/oumi#2599."""

    def turns(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "system", "content": "S"},
            _user(),
            _answer("", reasoning_content="need", tool_calls=[call]),
            {"role": "tool", "content": "42"},
            _answer("It is 42", reasoning_content="now"),
            _user("and"),
            _answer("so"),
        ]

    mapping, text = turns({"a": 1}), turns('{"a": 1}')
    whole = chat.encode(chat.render(mapping, add_generation_prompt=False))
    for given in (mapping, text):
        assert _one(maker, *given).input_ids.tolist() == whole
    assert _supervised(chat, _one(maker, *mapping[:5])).startswith("need\n</think>\n\n<tool_call>\n<function=f>")


def test_one_bos(tmp_path: Path):
    """huggingface/open-r1#462: the template prints it, and the tokenizer would add another."""
    folder = write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("<|endoftext|>" + PLAIN_TEMPLATE)
    assert tokenizer.encode("apple").ids[0] == 0
    for careful in (False, True):
        line = json.dumps({"id": "r", "messages": [_user(), _answer()]}).encode()
        batch = RowMaker(RowMakerSpec(folder, "faithful", 100)).make([(1, line)], "a.jsonl", careful=careful)
        assert batch.input_ids.tolist().count(0) == 1


def test_an_end_token_in_a_text_ends_nothing(maker: RowMaker, chat: Chat):
    """huggingface/transformers#29279, #47386."""
    quoted = _one(maker, _user("what is <|im_end|>?"), _answer("the <|im_end|> token"))
    assert _supervised(chat, quoted) == "</think>\n\nthe <|im_end|> token<|im_end|>"
    assert quoted.loss_mask[:-1].tolist().index(True) > quoted.input_ids.tolist().index(2), "the question's own is not"


def test_a_cut_sample_ends_as_it_was_cut(maker: RowMaker, folder: Path, chat: Chat):
    """allenai/open-instruct#1876; nothing left to learn: huggingface/trl#6320, #6025."""
    whole = _one(maker, _user(), _answer("apple " * 30))
    for max_tokens, is_cut in ((len(whole.input_ids), False), (len(whole.input_ids) - 1, True), (40, True)):
        shorter = RowMaker(RowMakerSpec(folder, "faithful", max_tokens))
        sample = _one(shorter, _user(), _answer("apple " * 30))
        assert sample.truncated == is_cut and sample.input_ids.tolist() == whole.input_ids[:max_tokens].tolist()
    assert chat.decode([int(sample.input_ids[-1])]) != "<|im_end|>"
    none = _make(shorter, {"messages": [_user("apple " * 50), _answer()]})
    assert none.sample_ids == [] and none.dropped[0].reason == "nothing to learn from within max_tokens"


def test_every_policy_changes_the_mask(folder: Path):
    """lightseekorg/TorchSpec#37, NVIDIA/Model-Optimizer#1211: an option that one code path did not read."""
    turns = [_user(), _answer("a", reasoning_content="t1"), _user(), _answer("b", reasoning_content="t2")]
    policies: tuple[Turns, ...] = ("faithful", "expand", "all")
    masks = [
        _make(RowMaker(RowMakerSpec(folder, policy, 1000)), {"messages": turns}).loss_mask.tolist()
        for policy in policies
    ]
    assert masks[0] != masks[1] != masks[2] != masks[0]
