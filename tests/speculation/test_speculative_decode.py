"""Promises: speculative decoding gives the target's greedy answer, counts every cycle, and stops at a stop token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftmill.contracts.acceptance import num_accepted, summarize
from draftmill.contracts.errors import InputError
from draftmill.extract.spread import spread
from draftmill.extract.target import Target, freeze, load_target
from draftmill.model.attention import DenseAttention
from draftmill.model.mask import one_document
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively
from draftmill.speculation.walk import ANCHORS_PER_PASS, walk_answer
from tiny import write_tiny_target
from tiny_drafter import overfit_drafter, random_drafter, tiny_shape
from tiny_families import tiny_model

pytestmark = pytest.mark.torch

PROMPTS = [[256, 10, 20, 30], [257, *range(40, 51)], [7]]
NEW_TOKENS = 21


def limits(stop_ids=(), max_new_tokens=NEW_TOKENS, prefill_tokens=2048) -> Limits:
    return Limits(frozenset(stop_ids), max_new_tokens, prefill_tokens)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def overfit(target: Target) -> Pair:
    answer = decode_plainly(target, PROMPTS[1], limits()).token_ids
    return Pair.of(target, overfit_drafter(target, tiny_shape(target), PROMPTS[1], answer))


def test_plain_decoding_is_what_transformers_generates(target):
    for prompt in PROMPTS:
        ids = target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
        )
        assert decode_plainly(target, prompt, limits()).token_ids == tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_a_random_drafter_changes_no_token(target, block_size):
    for seed, prompt in enumerate(PROMPTS):
        pair = Pair.of(target, random_drafter(tiny_shape(target, block_size=block_size), seed))
        got = decode_speculatively(pair, prompt, limits())
        assert got.token_ids == decode_plainly(target, prompt, limits()).token_ids
        assert sum(got.emitted) == len(got.token_ids) - 1
        assert all(len(draft.token_ids) == block_size - 1 for draft in got.drafts)


def test_a_drafter_that_knows_the_answer_is_accepted_in_full_blocks(overfit):
    got = decode_speculatively(overfit, PROMPTS[1], limits())
    assert got.token_ids == decode_plainly(overfit.target, PROMPTS[1], limits()).token_ids
    assert got.emitted == (4, 4, 4, 4, 4)


def test_the_same_drafter_elsewhere_is_still_lossless(overfit):
    for prompt in PROMPTS:
        got = decode_speculatively(overfit, prompt, limits())
        assert got.token_ids == decode_plainly(overfit.target, prompt, limits()).token_ids


@pytest.mark.parametrize("prefill_tokens", [12, 6, 3, 1])
def test_a_prompt_read_in_chunks_gives_identical_drafts(overfit, prefill_tokens):
    whole = decode_speculatively(overfit, PROMPTS[1], limits())
    cut = decode_speculatively(overfit, PROMPTS[1], limits(prefill_tokens=prefill_tokens))
    assert cut.token_ids == whole.token_ids
    assert [d.token_ids for d in cut.drafts] == [d.token_ids for d in whole.drafts]
    assert decode_plainly(overfit.target, PROMPTS[1], limits(prefill_tokens=prefill_tokens)).token_ids == cut.token_ids


def test_a_stop_token_in_mid_cycle_ends_the_answer_and_is_counted(overfit):
    answer = decode_plainly(overfit.target, PROMPTS[1], limits()).token_ids
    at = next(at for at in (6, 7, 10, 11) if answer[at] not in answer[:at])
    stop = limits(stop_ids=[answer[at]])
    assert decode_plainly(overfit.target, PROMPTS[1], stop).token_ids == answer[: at + 1]
    got = decode_speculatively(overfit, PROMPTS[1], stop)
    assert got.token_ids == answer[: at + 1]
    assert got.emitted == (4,) * (at // 4) + (at % 4,)
    assert walk_answer(overfit, PROMPTS[1], got.token_ids).emitted == got.emitted


def test_a_stop_token_first_of_all_leaves_no_cycle(target):
    first = decode_plainly(target, PROMPTS[0], limits()).token_ids[0]
    pair = Pair.of(target, random_drafter(tiny_shape(target)))
    got = decode_speculatively(pair, PROMPTS[0], limits(stop_ids=[first]))
    assert (got.token_ids, got.emitted) == ((first,), ())
    assert walk_answer(pair, PROMPTS[0], got.token_ids).emitted == ()


def test_the_cut_of_an_answer_keeps_the_stop_token_and_nothing_behind_it():
    assert limits(stop_ids=[9], max_new_tokens=5).cut([1, 9, 2, 9]) == [1, 9]
    assert limits(stop_ids=[9], max_new_tokens=2).cut([1, 2, 9]) == [1, 2]
    assert not limits(stop_ids=[9]).is_complete([])


def test_the_classic_trace_counts_up_to_the_stop_token():
    # Drafts accepted: 3, then 0, then 5 of which the second is the stop token. Emitted: 3 + bonus, bonus, 2.
    stop = 99
    answer = [1, 2, 3, 4, 5, 6, 7, stop]
    cycles = [([2, 3, 4, 0, 0], [2, 3, 4, 5]), ([0, 0, 0, 0, 0], [6]), ([7, stop, 8, 8, 8], [7, stop, 8, 8, 8, 8])]
    emitted = []
    for draft, truth in cycles:
        emitted.append(len(limits(stop_ids=[stop]).cut(truth[: num_accepted(draft, truth) + 1])))
    assert emitted == [4, 1, 2]
    assert sum(emitted) == len(answer) - 1
    assert summarize([emitted], block_size=6).tau == pytest.approx(7 / 3)


def naive_cycles(pair: Pair, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
    """Speculative decoding that keeps nothing: every draft and every check reads the whole text again."""
    shape = pair.drafter.shape
    with torch.no_grad():
        ids = [*prompt, int(pair.target.model(torch.tensor([prompt])).logits[0, -1].argmax())]
        emitted = []
        while len(ids) - len(prompt) < max_new_tokens:
            anchor = len(ids) - 1
            states = pair.target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            features = torch.cat([states[tap + 1][0] for tap in shape.tap_ids], dim=-1)
            layout = one_document(torch.tensor([anchor]), len(ids), shape.block_size)
            block = torch.tensor([ids[anchor]] + [shape.mask_id] * (shape.block_size - 1))
            context = pair.drafter.project(features)
            hidden = pair.drafter(pair.target.embed(block), context, layout, DenseAttention(layout))
            draft = pair.target.head(hidden[1:]).argmax(-1).tolist()
            new: list[int] = []
            for slot in range(shape.block_size):
                new.append(int(pair.target.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
                if slot == len(draft) or draft[slot] != new[-1]:
                    break
            new = new[: max_new_tokens - (len(ids) - len(prompt))]
            ids += new
            emitted.append(len(new))
    return ids[len(prompt) :], emitted


@pytest.mark.parametrize(("window", "num_steps"), [(None, 10), (5, 4)])
def test_cycles_equal_those_of_a_loop_without_any_cache(target, window, num_steps):
    prompt = PROMPTS[1]
    answer = decode_plainly(target, prompt, limits()).token_ids
    # Half-trained: some drafts are right, some are not.
    drafter = overfit_drafter(target, tiny_shape(target, window=window), prompt, answer, num_steps)
    pair = Pair.of(target, drafter)
    token_ids, emitted = naive_cycles(pair, prompt, NEW_TOKENS)
    got = decode_speculatively(pair, prompt, limits())
    assert len(set(emitted)) > 1, "the case must hold accepted and refused drafts"
    assert (list(got.token_ids), list(got.emitted)) == (token_ids, emitted)
    walked = walk_answer(pair, prompt, got.token_ids)
    assert list(walked.emitted) == emitted
    assert [d.token_ids for d in walked.drafts] == [d.token_ids for d in got.drafts]


def test_a_long_answer_is_walked_in_several_passes_as_in_one(target):
    pair = Pair.of(target, random_drafter(tiny_shape(target)))
    answer = torch.randint(0, 250, (ANCHORS_PER_PASS + 60,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = walk_answer(pair, PROMPTS[0], answer)
    assert sum(whole.emitted) == len(answer) - 1
    # From the second pass on: the same text, its first half read as prompt.
    cycle = next(c for c in range(len(whole.emitted)) if sum(whole.emitted[:c]) >= ANCHORS_PER_PASS - 20)
    start = sum(whole.emitted[:cycle])
    second = walk_answer(pair, [*PROMPTS[0], *answer[:start]], answer[start:])
    assert second.emitted == whole.emitted[cycle:]
    assert [d.token_ids for d in second.drafts] == [d.token_ids for d in whole.drafts[cycle:]]


def test_a_target_with_sliding_layers_is_cropped_right():
    config = Qwen3Config(
        vocab_size=272, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, initializer_range=0.2, use_sliding_window=True, sliding_window=6, max_window_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    target = freeze(Qwen3ForCausalLM(config))
    assert "sliding_attention" in target.config.layer_types
    pair = Pair.of(target, random_drafter(tiny_shape(target)))
    for prompt in PROMPTS:
        token_ids, emitted = naive_cycles(pair, prompt, 12)
        got = decode_speculatively(pair, prompt, limits(max_new_tokens=12))
        assert (list(got.token_ids), list(got.emitted)) == (token_ids, emitted)
        assert decode_plainly(target, prompt, limits(max_new_tokens=12)).token_ids == got.token_ids


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_target_with_recurrent_state_is_put_back_to_what_was_kept(family: str) -> None:
    target = freeze(tiny_model(family))
    prompt = [5, 90, 17, 44, 3]
    answer = decode_plainly(target, prompt, limits()).token_ids
    shape = replace(tiny_shape(target), mask_id=95)
    pair = Pair.of(target, overfit_drafter(target, shape, prompt, answer, num_steps=8))
    token_ids, emitted = naive_cycles(pair, prompt, NEW_TOKENS)
    assert len(set(emitted)) > 1, "the case must hold accepted and refused drafts"
    assert token_ids == list(answer)
    for prefill_tokens in (2048, 2):
        got = decode_speculatively(pair, prompt, limits(prefill_tokens=prefill_tokens))
        assert (list(got.token_ids), list(got.emitted)) == (token_ids, emitted)
    assert list(walk_answer(pair, prompt, answer).emitted) == emitted


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_target_that_is_spread_decodes_and_is_walked_as_in_one_place(family: str, tmp_path: Path) -> None:
    target, apart = freeze(tiny_model(family)), freeze(tiny_model(family))
    spread(apart, ["cpu", "cpu", "disk", "cpu", "cpu"], tmp_path)
    prompt = [5, 90, 17, 44, 3]
    answer = decode_plainly(target, prompt, limits()).token_ids
    drafter = overfit_drafter(target, replace(tiny_shape(target), mask_id=95), prompt, answer, num_steps=8)
    here, there = Pair.of(target, drafter), Pair.of(apart, drafter)
    assert decode_plainly(apart, prompt, limits()) == decode_plainly(target, prompt, limits())
    assert decode_speculatively(there, prompt, limits()) == decode_speculatively(here, prompt, limits())
    assert walk_answer(there, prompt, answer) == walk_answer(here, prompt, answer)


def test_a_drafter_of_another_target_is_refused(target, tmp_path: Path):
    other = load_target(write_tiny_target(tmp_path, num_layers=5))
    with pytest.raises(InputError, match="trained for a target of"):
        Pair.of(other, random_drafter(tiny_shape(target)))
