"""Documents share a row of the target only where each is read as it is alone, and that is found out by measuring."""

import pytest
import torch

from draftmill.extract.packing import PackedReader, can_pack, extractor_of
from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target, freeze
from tiny_families import VOCAB, tiny_model

pytestmark = pytest.mark.torch

TAPS = (0, 2, 3)
LENGTHS = (12, 5, 17)


def target_of(family: str, dtype: torch.dtype = torch.float32) -> Target:
    return freeze(tiny_model(family).to(dtype))


def documents() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator), torch.tensor(LENGTHS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_attention_alone_keeps_packed_documents_apart(family: str) -> None:
    reader = TapReader(target_of(family), TAPS, has_last=True)
    assert can_pack(reader)
    packed, alone = PackedReader(reader).read_states(*documents()), reader.read_states(*documents())
    torch.testing.assert_close(packed.features_RTF, alone.features_RTF, rtol=1e-4, atol=1e-4)
    assert packed.last_RTH is not None
    torch.testing.assert_close(packed.last_RTH, alone.last_RTH, rtol=1e-4, atol=1e-4)
    assert not packed.features_RTF[1, LENGTHS[1] :].any()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_5_wrapper"])
def test_linear_attention_leaks_and_is_found_out(family: str) -> None:
    reader = TapReader(target_of(family), TAPS)
    packed, alone = PackedReader(reader).read_states(*documents()), reader.read_states(*documents())
    torch.testing.assert_close(packed.features_RTF[0], alone.features_RTF[0], rtol=1e-4, atol=1e-4)
    assert (packed.features_RTF[1] - alone.features_RTF[1]).abs().max() > 0.01 * alone.features_RTF[1].abs().max()
    assert not can_pack(reader)


def test_the_answer_is_the_same_in_bfloat16() -> None:
    assert can_pack(TapReader(target_of("qwen3", torch.bfloat16), TAPS))
    assert not can_pack(TapReader(target_of("qwen3_5", torch.bfloat16), TAPS))


def test_documents_are_packed_where_asked_for_and_proven_and_the_answer_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, hybrid = TapReader(target_of("qwen3"), TAPS), TapReader(target_of("qwen3_5"), TAPS)
    with caplog.at_level("INFO"):
        assert extractor_of(plain, "off") is plain
        assert not caplog.records
        assert isinstance(extractor_of(plain, "auto"), PackedReader)
        assert extractor_of(hybrid, "auto") is hybrid
    assert [record.getMessage() for record in caplog.records] == [
        "packing documents through Qwen3ForCausalLM: yes",
        "packing documents through Qwen3_5ForCausalLM: no, they leak",
    ]
