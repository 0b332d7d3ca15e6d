"""Rotary tables are transformers' own in float32, bit for bit, and close to float64 far out."""

import pytest

torch = pytest.importorskip("torch")
from transformers import Qwen3Config  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

from draftmill.model.rope import rope_table, rotate  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_tables_and_rotation_are_transformers_own(theta: float, head_dim: int) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    config = Qwen3Config(head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=rope)
    positions = torch.cat([torch.arange(70), torch.tensor([4_095, 32_768, 200_000])])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = rope_table(positions, head_dim, theta)
    assert torch.equal(table[0], cos[0]) and torch.equal(table[1], sin[0])
    states = torch.randn(2, len(positions), head_dim, generator=torch.Generator().manual_seed(0))
    turned, _ = apply_rotary_pos_emb(states[None], states[None], cos, sin)
    assert torch.equal(rotate(states, table), turned[0])


@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_at_position_32768_tables_are_within_four_thousandths_of_float64(theta: float) -> None:
    positions, head_dim = torch.tensor([32_768]), 128
    angles = positions[:, None].double() / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    cos, sin = rope_table(positions, head_dim, theta)
    assert (cos - torch.cat([angles, angles], -1).cos()).abs().max() < 4e-3
    assert (sin - torch.cat([angles, angles], -1).sin()).abs().max() < 4e-3


def test_tables_stay_float32_under_autocast_and_rotation_keeps_the_states_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        table = rope_table(torch.arange(5), 16, 1e6)
        assert table[0].dtype == table[1].dtype == torch.float32
        assert rotate(torch.ones(1, 5, 16, dtype=torch.bfloat16), table).dtype == torch.bfloat16
