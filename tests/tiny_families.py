"""A tiny random model of every family of targets, in memory, with norm gains away from their start."""

from typing import Any

import torch
import transformers as hf

VOCAB, HIDDEN, LAYERS = 96, 32, 5
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
_HYBRID: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN},
    **{"num_position_embeddings": 16},
}
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_wrapper", "qwen3_5_moe_wrapper")


def tiny_model(family: str) -> Any:
    """The family's causal language model, or its wrapper for conditional generation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _made(family).eval()
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.data.add_(torch.empty_like(weight).uniform_(-0.4, 0.4))
    return model


def _made(family: str) -> Any:
    hybrid = {**_SIZES, **_HYBRID}
    sparse = {**hybrid, **_EXPERTS, "shared_expert_intermediate_size": 24}
    del sparse["intermediate_size"]  # every layer is a mixture
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, **_PLAIN_ROPE))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES, **_PLAIN_ROPE))
    if family == "qwen3_moe":
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_PLAIN_ROPE, **_EXPERTS))
    if family == "qwen3_5":
        return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**hybrid))
    if family == "qwen3_5_moe":
        return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**sparse))
    if family == "qwen3_5_wrapper":
        return hf.Qwen3_5ForConditionalGeneration(hf.Qwen3_5Config(text_config=hybrid, vision_config=_VISION))
    assert family == "qwen3_5_moe_wrapper"
    return hf.Qwen3_5MoeForConditionalGeneration(hf.Qwen3_5MoeConfig(text_config=sparse, vision_config=_VISION))
