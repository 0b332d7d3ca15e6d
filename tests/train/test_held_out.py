"""Measured on the way is what evaluate measures: real decoding, and the walk from the first answer token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from pydantic import ValidationError  # noqa: E402

from draftmill.contracts.acceptance import summarize  # noqa: E402
from draftmill.contracts.errors import InputError  # noqa: E402
from draftmill.extract.target import Target, freeze, load_target  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively  # noqa: E402
from draftmill.speculation.requests import Request  # noqa: E402
from draftmill.train.held_out import HeldOut, MeasuringError, is_due, next_due, tell  # noqa: E402
from draftmill.train.interruption import StoppedError  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_drafter import overfit_drafter, random_drafter, tiny_shape  # noqa: E402
from tiny_families import tiny_model  # noqa: E402

pytestmark = pytest.mark.torch

NEW_TOKENS = 21
LIMITS = Limits(frozenset(), NEW_TOKENS, 2048)
PROMPTS = [(256, 10, 20, 30), (257, *range(40, 51)), (7,)]


def settings(**changed: object) -> TrainSettings:
    chosen = {"save_every": 5, "eval_every": 10, "eval_input": ("in",), "eval_max_new_tokens": NEW_TOKENS, **changed}
    return TrainSettings(input="in", output=("out",), target="t", **chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def requests(target: Target) -> list[Request]:
    answers = [decode_plainly(target, prompt, LIMITS).token_ids for prompt in PROMPTS]
    return [Request(f"r{i}", "all", *pair) for i, pair in enumerate(zip(PROMPTS, answers, strict=True))]


@pytest.fixture(scope="module")
def half_trained(target: Target, requests: Sequence[Request]) -> Drafter:
    return overfit_drafter(target, tiny_shape(target), requests[1].prompt_ids, requests[1].answer_ids, num_steps=10)


def held_out(target: Target, requests: Sequence[Request], **changed: object) -> HeldOut:
    return HeldOut(target, requests, frozenset(), settings(**changed))


def test_tau_is_that_of_decoding_and_the_walk_of_the_same_answers_agrees(
    target: Target, requests: Sequence[Request], half_trained: Drafter
) -> None:
    figures = held_out(target, requests).measure(half_trained)
    pair = Pair.of(target, half_trained)
    cycles = [decode_speculatively(pair, request.prompt_ids, LIMITS).emitted for request in requests]
    expected = summarize(cycles, half_trained.shape.block_size)
    assert 1.1 < expected.tau < 4, "the case must hold accepted and refused drafts"
    assert (figures["tau"], figures["tau_micro"]) == (expected.tau, expected.tau_micro)
    assert (figures["tau_walked"], figures["tau_walked_micro"]) == (expected.tau, expected.tau_micro)
    assert figures["eval_s"] > 0


def test_the_weights_measured_are_left_as_they_were(target: Target, requests: Sequence[Request]) -> None:
    drafter = random_drafter(tiny_shape(target)).train()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    state = torch.random.get_rng_state()
    held_out(target, requests).measure(drafter)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert drafter.training and all(p.requires_grad for p in drafter.parameters())
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_masters_stay_float32_beside_a_target_in_bfloat16(tmp_path: Path) -> None:
    narrow = load_target(write_tiny_target(tmp_path), dtype=torch.bfloat16)
    drafter = random_drafter(tiny_shape(narrow))
    figures = held_out(narrow, [Request("r", "all", PROMPTS[1], (1, 2, 3))]).measure(drafter)
    assert figures["tau"] >= 1 and figures["tau_walked"] >= 1
    assert all(p.dtype == torch.float32 for p in drafter.parameters())


def test_an_untrained_drafter_is_accepted_once_in_a_while_and_no_more(
    target: Target, requests: Sequence[Request]
) -> None:
    figures = held_out(target, requests).measure(random_drafter(tiny_shape(target)))
    assert 1.0 <= figures["tau"] < 1.1


def test_a_drafter_that_knows_the_held_out_answer_by_heart_warns_of_a_leak(
    target: Target, requests: Sequence[Request], caplog: pytest.LogCaptureFixture
) -> None:
    knowing = overfit_drafter(target, tiny_shape(target), requests[1].prompt_ids, requests[1].answer_ids)
    figures = held_out(target, [requests[1]]).measure(knowing)
    assert figures["tau"] == 4.0
    tell(figures, knowing.shape.block_size)
    assert "4.00 of 4" in caplog.text and "test_perturbation" in caplog.text


def test_prompts_without_an_answer_are_only_decoded(
    target: Target, requests: Sequence[Request], half_trained: Drafter
) -> None:
    bare = [Request(request.id, request.family, request.prompt_ids, ()) for request in requests]
    chosen = held_out(target, bare, eval_decode_prompts=2)
    assert (len(chosen.decoded), chosen.walked) == (2, ())
    figures = chosen.measure(half_trained)
    assert figures["tau"] >= 1 and figures["tau_walked"] is None
    with pytest.raises(InputError, match=r"0 do not fit .* 0 have an answer to walk: lower --eval-max-new-tokens"):
        held_out(target, bare, eval_decode_prompts=0)
    with pytest.raises(InputError, match="3 do not fit the target's window of 512"):
        held_out(target, requests, eval_max_new_tokens=512)


def test_a_target_with_recurrent_state_is_decoded_as_it_is_walked() -> None:
    hybrid = freeze(tiny_model("qwen3_5"))
    prompt = (5, 90, 17, 44, 3)
    answer = decode_plainly(hybrid, prompt, LIMITS).token_ids
    drafter = overfit_drafter(hybrid, replace(tiny_shape(hybrid), mask_id=95), prompt, answer, num_steps=8)
    figures = held_out(hybrid, [Request("r", "all", prompt, answer)]).measure(drafter)
    assert 1.1 < figures["tau"] < 4, "the case must hold accepted and refused drafts"
    assert figures["tau"] == figures["tau_walked"]


def test_a_run_is_measured_at_its_own_steps_and_at_its_last() -> None:
    due = [step for step in range(34) if is_due(10, step, 33)]
    assert due == [10, 20, 30, 33] and not any(is_due(None, step, 33) for step in range(34))
    assert [next_due(10, done, 33) for done in (0, 9, 10, 30, 32)] == [10, 10, 20, 33, 33]
    assert next_due(None, 5, 33) == 33


def test_who_is_to_stop_is_heeded_before_each_request(
    target: Target, requests: Sequence[Request], half_trained: Drafter
) -> None:
    chosen = held_out(target, requests, eval_decode_prompts=2)
    num_requests = 2 + len(requests)
    for num_let_through in (num_requests - 1, num_requests):
        left = num_let_through

        def heed() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoppedError

        chosen.heed = heed
        if num_let_through < num_requests:
            with pytest.raises(StoppedError):
                chosen.measure(half_trained)
        else:
            assert chosen.measure(half_trained)["tau"] > 1 and left == 0


def test_a_device_too_full_to_measure_is_told_with_the_flags_of_measuring(
    target: Target, requests: Sequence[Request], half_trained: Drafter
) -> None:
    chosen = held_out(target, requests)

    def be_full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    chosen.heed = be_full
    with pytest.raises(MeasuringError, match=r"2 GiB\.\): lower --eval-max-new-tokens or .* leave --eval-every out"):
        chosen.measure(half_trained)


def test_settings_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="--eval-every needs --eval-input"):
        settings(eval_input=())
    with pytest.raises(ValidationError, match="--eval-every 7 is not a multiple of --save-every 5"):
        settings(eval_every=7)
    with pytest.raises(ValidationError, match="both 0"):
        settings(eval_decode_prompts=0, eval_walk_prompts=0)
    assert settings(eval_every=None, eval_input=()).eval_every is None
