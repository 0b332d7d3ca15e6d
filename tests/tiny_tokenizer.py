"""A real byte-level BPE tokenizer of a few hundred tokens with a ChatML template, made in a moment and torch-free."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")  # added, but not flagged special, as Qwen's are
_VOCABULARY_ROWS = 384
# Qwen's cut into words: a run of line ends stays whole, so `\n\n` can be one token wherever it stands.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PLAIN_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen's: trims what it prints, keeps reasoning after the last user message only, opens it in the generation prompt.
THINKING_TEMPLATE = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.last_query < 0 %}{{- raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- set content = (message.content or '') | trim %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content | trim %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role in ['system', 'user'] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Blank lines often enough that `\n\n` becomes one token, as in every real vocabulary.
_LINES = [
    "system\nYou are a helpful assistant.\n\n",
    "user\nRepeat the word apple three times.\n\n",
    "assistant\napple apple apple\n\nThat is all.\n\n",
    "Count from one to ten: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10.\n\n",
    "List some colours: red, green, blue, yellow.\n\n",
] * 4


def write_tiny_tokenizer(folder: Path, *, thinking: bool = False, special: Sequence[str] = ()) -> Path:
    """Writes tokenizer.json and tokenizer_config.json (template, eos) into `folder`; returns it.

    `special` are more special tokens, for templates of other families.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_ROWS,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if thinking:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": THINKING_TEMPLATE if thinking else PLAIN_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
