"""A tiny random target with a byte-level ChatML tokenizer, written as an ordinary Hugging Face folder.

`write_tiny_tokenizer` needs no torch; `write_tiny_target` adds config and weights and does.
"""

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TEXT_ID, IM_START_ID, IM_END_ID, THINK_ID, END_THINK_ID = range(256, 261)
NUM_TOKENS = 256 + len(SPECIAL_TOKENS)
# A few rows more than tokens, as real targets have: room for a mask id.
VOCAB_SIZE = 272

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_tokenizer(folder: Path, *, chat_template: str | None = CHATML) -> Path:
    """Writes tokenizer.json and tokenizer_config.json: a token per byte (ids 0..255), then `SPECIAL_TOKENS`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As in Qwen3, the think tags are added tokens without being special: decoding keeps them.
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS[:3]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SPECIAL_TOKENS[3:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte value in a byte-level vocabulary, in byte order (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


# Three of four layers of a Qwen3.5 target are linear attention.
_LINEAR_ATTENTION = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


def write_tiny_target(
    folder: Path,
    *,
    family: Literal["llama", "qwen3", "qwen3_5"] = "llama",
    num_layers: int = 6,
    hidden_size: int = 64,
    vocab_size: int = VOCAB_SIZE,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    chat_template: str | None = CHATML,
) -> Path:
    """Writes a random target (4 query heads, 2 key-value heads) with its tokenizer; returns the folder."""
    import torch
    import transformers as hf

    kinds = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {}),
        "qwen3_5": (hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM, _LINEAR_ATTENTION),
    }
    config_class, model_class, own = kinds[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        # Wide weights: logits far apart, so that greedy answers differ between prompts and seldom meet a tie.
        initializer_range=0.2,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=IM_START_ID,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        **own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, weight in model.named_parameters():
            # Norm gains away from 1, so that before and after a norm are told apart.
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    return write_tiny_tokenizer(folder, chat_template=chat_template)
