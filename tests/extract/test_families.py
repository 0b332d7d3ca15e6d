"""Every family's layers, norm, embedding and head are found; what is read and rebuilt from it is its own."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM

from draftmill.contracts.errors import DataGateError, InputError
from draftmill.extract.agreement import DECODED_TOKENS, Text, check_target
from draftmill.extract.families import QWEN3, QWEN3_5
from draftmill.extract.taps import TapReader, check_taps
from draftmill.extract.target import Target, freeze, load_target, refuse_unfit_hybrid
from tiny_families import FAMILIES, HIDDEN, LAYERS, VOCAB, tiny_model

pytestmark = pytest.mark.torch

TAPS = (0, 2, 3)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return freeze(tiny_model(request.param))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def test_the_parts_of_every_family_are_found(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert target.rope_theta in (5e5, 1e7)
    check_taps(TapReader(target, TAPS), ids(2, 12))


def test_the_targets_distribution_is_rebuilt_from_its_last_state_exactly(target: Target) -> None:
    ids_RT = ids(2, 14)
    states = TapReader(target, TAPS, has_last=True).read_states(ids_RT, torch.tensor([14, 14]))
    assert states.last_RTH is not None
    with torch.no_grad():
        own = target.model(input_ids=ids_RT).logits
        assert torch.equal(target.head(target.norm(states.last_RTH)), own)
        # Without the final norm, or with it applied as another family's is, the distribution is another one.
        assert not torch.allclose(target.head(states.last_RTH), own, atol=1e-2)
    assert torch.equal(states.features_RTF, TapReader(target, TAPS).read(ids_RT, torch.tensor([14, 14])))


def test_right_padding_changes_no_state_of_the_document(target: Target) -> None:
    ids_RT, lengths_R = ids(3, 20), torch.tensor([20, 7, 13])
    together = TapReader(target, TAPS, has_last=True).read_states(ids_RT, lengths_R)
    for row, length in enumerate(lengths_R.tolist()):
        alone = TapReader(target, TAPS, has_last=True).read_states(ids_RT[row : row + 1, :length], lengths_R[row, None])
        torch.testing.assert_close(together.features_RTF[row, :length], alone.features_RTF[0], **CLOSE)
        assert together.last_RTH is not None and alone.last_RTH is not None
        torch.testing.assert_close(together.last_RTH[row, :length], alone.last_RTH[0], **CLOSE)
        assert not together.last_RTH[row, length:].any()


def test_a_norms_gain_is_what_it_multiplies_by(target: Target) -> None:
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    plain = nn.functional.rms_norm(states, (HIDDEN,), eps=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(plain * target.family.gain(target.norm), target.norm(states), rtol=1e-4, atol=1e-5)


def test_a_norm_of_another_rule_is_refused() -> None:
    hybrid, plain = freeze(tiny_model("qwen3_5")), freeze(tiny_model("qwen3"))
    with pytest.raises(InputError, match="does not multiply by its weight \\+ 0"):
        QWEN3.gain(hybrid.norm)
    with pytest.raises(InputError, match="does not multiply by its weight \\+ 1"):
        QWEN3_5.gain(plain.norm)


@pytest.mark.parametrize("family", ["qwen3_5_wrapper", "qwen3_5_moe_wrapper"])
def test_a_wrappers_folder_is_loaded_as_its_language_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded, ids_RT = load_target(tmp_path), ids(1, 9)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(input_ids=ids_RT).logits, model(input_ids=ids_RT).logits, **CLOSE)
    assert loaded.family is QWEN3_5


def test_a_hybrid_is_refused_on_cuda_without_its_kernels() -> None:
    hybrid = freeze(tiny_model("qwen3_5"))
    refuse_unfit_hybrid(hybrid, torch.device("cpu"))
    with pytest.raises(InputError, match="flash-linear-attention"):
        refuse_unfit_hybrid(hybrid, torch.device("cuda"))
    refuse_unfit_hybrid(freeze(tiny_model("llama")), torch.device("cuda"))


def test_a_hybrid_is_refused_on_cuda_in_float32_which_its_kernels_do_not_take() -> None:
    with pytest.raises(InputError, match="take no float32: give --compute-dtype bfloat16"):
        refuse_unfit_hybrid(freeze(tiny_model("qwen3_5")), torch.device("cuda"), packages=())
    refuse_unfit_hybrid(freeze(tiny_model("qwen3_5").bfloat16()), torch.device("cuda"), packages=())


def test_a_target_knows_what_it_wrote_and_random_weights_do_not(caplog: pytest.LogCaptureFixture) -> None:
    from draftmill.extract.decode import decode_greedy

    writer, other = freeze(tiny_model("llama")), freeze(tiny_model("qwen3"))
    prompt = ids(9).tolist()
    text = Text([*prompt, *decode_greedy(writer, [prompt], frozenset(), 30)[0].token_ids], len(prompt))
    with caplog.at_level("INFO"):
        check_target(writer, [text], 0.9)
    assert f"set's own: {DECODED_TOKENS}" in caplog.text
    with pytest.raises(DataGateError, match=r"--min-agreement 0\.5.*weights are random"):
        check_target(other, [text], 0.5)
    check_target(other, [text], 0.0)


def test_a_target_that_does_more_to_its_logits_than_its_head_does_is_refused() -> None:
    config = tiny_model("llama").config.to_dict()
    text = Text(ids(20).tolist(), 9)
    scaled = GraniteForCausalLM(GraniteConfig(**{**config, "model_type": "granite", "logits_scaling": 3.0}))
    with pytest.raises(InputError, match=r"GraniteForCausalLM makes more of its logits.*apart, of logits up to"):
        check_target(freeze(scaled), [text], 0.0)
    plain = GraniteForCausalLM(GraniteConfig(**{**config, "model_type": "granite", "logits_scaling": 1.0}))
    check_target(freeze(plain), [text], 0.0)


def test_logits_that_are_not_finite_are_told_as_that() -> None:
    target = freeze(tiny_model("llama"))
    target.head.weight[3] = float("inf")
    with pytest.raises(InputError, match="LlamaForCausalLM gives logits that are not finite; load it in a wider dtype"):
        check_target(target, [Text(ids(20).tolist(), 9)], 0.0)


def test_a_head_with_a_bias_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = nn.Linear(HIDDEN, VOCAB)
    with pytest.raises(InputError, match="its head adds a bias"):
        freeze(model)
