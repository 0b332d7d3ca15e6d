"""Quantized targets: features come from the weights that are served, so what is served quantized is read quantized.

transformers loads every format that a config.json names under `quantization_config` (compressed-tensors, fp8, AWQ,
GPTQ, bitsandbytes, torchao, …). Where a device has no kernel for one it may fall back to float weights and go on
(transformers 5.24, `quantizer_finegrained_fp8.py`: "we will default to dequantizing the model"), or skip a method that
it does not know; a drafter would then be trained on another model than the one it drafts for. Both are refused.

What a drafter borrows, embedding, final norm and head, takes part in its own forward and backward pass: plain float
weights, as checkpoints quantized for vLLM and SGLang keep them (`lm_head` on their list of what is ignored).
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftmill.contracts.errors import InputError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEY = "quantization_config"


def refuse_dequantized(name: str, declared: dict[str, Any], model: Any) -> None:
    """InputError where a checkpoint's config names a quantization and transformers took the loaded model's away."""
    wanted = declared.get(_KEY) or declared.get("text_config", {}).get(_KEY)
    # transformers keeps what runs a quantized model on it, and deletes it where it falls back to float weights.
    if wanted and vars(model).get("hf_quantizer") is None:
        raise InputError(
            f"{name} is quantized ({wanted.get('quant_method')}), and transformers loaded its weights as floats (see "
            "its warning): features would be those of another model than the one that is served; run where the format "
            "has kernels, or name a target that is served as it is loaded"
        )


def refuse_quantized_parts(name: str, parts: dict[str, nn.Module]) -> None:
    """InputError where a part that a drafter borrows has no plain float weight."""
    for part, module in parts.items():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or not is_plain_float(weight):
            found = "none" if weight is None else f"{type(weight.data).__name__} of {weight.dtype}"
            raise InputError(
                f"{name}: a drafter borrows the target's {part}, whose weight must be plain floats, and it is {found}: "
                f"use a checkpoint quantized without it ({part} among the modules that are ignored)"
            )


def refuse_spreading(name: str, model: Any) -> None:
    """InputError where a target's weights are quantized: they are prepared for the device that they were loaded on.

    transformers' fp8 modules give garbage on a second one unless they are told of it while they are loaded (5.24,
    `_disable_deepgemm_on_multi_device`); compressed-tensors keeps weights in an offload cache of its own, which
    accelerate does not know (0.20, `offload/cache`).
    """
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is not None:
        raise InputError(
            f"{name} is quantized ({quantizer.quantization_config.quant_method.value}), and its weights are prepared "
            "for the device that they are loaded on: only float weights can be spread; set --target-gpus 1"
        )


@torch.no_grad()
def unpack(model: Any) -> None:
    """Lets a format that unpacks its weights when the model is first called do so (compressed-tensors): features are
    read from the decoder stack within, and the model itself need never be called."""
    if model._forward_pre_hooks:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)


def is_plain_float(weight: Tensor) -> bool:
    """Whether arithmetic on a weight means what it says: an ordinary tensor of floats, not packed or scaled."""
    return type(weight.data) is Tensor and weight.dtype in FLOAT_DTYPES
