"""A batched answer is the answer the prompt has alone, whatever stands beside it."""

from pathlib import Path

import pytest
import torch

from draftmill.extract.decode import Answer, decode_greedy
from draftmill.extract.target import Target, freeze, load_target
from tiny import IM_END_ID, write_tiny_target

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["llama", "qwen3", "hybrid"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    if request.param == "hybrid":
        return tiny_hybrid()
    return load_target(write_tiny_target(tmp_path_factory.mktemp(request.param), family=request.param))


def tiny_hybrid() -> Target:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    config = Qwen3_5TextConfig(
        vocab_size=272,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.2,
        rope_parameters=rope,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return freeze(Qwen3_5ForCausalLM(config))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (3, 11, 1, 7, 19, 4)]


def naive(target: Target, prompt: list[int], stop_ids: frozenset[int], max_tokens: int) -> Answer:
    """The same without batch or cache: the whole text anew for every token."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + max_tokens and not (len(ids) > len(prompt) and ids[-1] in stop_ids):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return Answer(ids[len(prompt) :], ids[-1] in stop_ids)


def test_batched_answers_are_those_of_each_prompt_alone(target: Target) -> None:
    # Many stop ids, so that rows end at different times and the batch shrinks under way.
    stop_ids = frozenset(range(0, 272, 12))
    answers = decode_greedy(target, prompts(), stop_ids, max_tokens=24)
    assert answers == [naive(target, prompt, stop_ids, max_tokens=24) for prompt in prompts()]
    assert len({len(a.token_ids) for a in answers}) > 2


def test_the_order_of_the_batch_does_not_matter(target: Target) -> None:
    forth = decode_greedy(target, prompts(), frozenset({IM_END_ID}), max_tokens=8)
    back = decode_greedy(target, prompts()[::-1], frozenset({IM_END_ID}), max_tokens=8)
    assert back[::-1] == forth


def test_an_answer_is_cut_at_the_limit_without_a_stop_token(target: Target) -> None:
    (answer,) = decode_greedy(target, [[5, 6]], frozenset(), max_tokens=1)
    assert (len(answer.token_ids), answer.has_stopped) == (1, False)


def test_the_stop_token_is_kept_and_ends_the_answer(target: Target) -> None:
    (answer,) = decode_greedy(target, [[5, 6]], frozenset(range(272)), max_tokens=9)
    assert (len(answer.token_ids), answer.has_stopped) == (1, True)


def test_a_row_that_ended_is_computed_no_further(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path, num_layers=1))
    rows = []
    hook = target.head.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[0]))
    answers = decode_greedy(target, prompts(), frozenset(range(0, 272, 8)), max_tokens=30)
    hook.remove()
    assert sum(rows) == sum(len(a.token_ids) for a in answers)
