"""The tiny tokenizer is lossless and keeps its special ids where `tiny` says they are."""

from pathlib import Path

from tokenizers import Tokenizer

from tiny import IM_END_ID, NUM_TOKENS, SPECIAL_TOKENS, write_tiny_tokenizer


def test_every_byte_and_special_token_comes_back_from_its_id(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_tokenizer(tmp_path) / "tokenizer.json"))
    text = "".join(SPECIAL_TOKENS) + bytes(range(128)).decode() + "é€\u2028🙂"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(SPECIAL_TOKENS) + 128 + 2 + 3 + 3 + 4
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<|im_end|>") == IM_END_ID
    assert tokenizer.get_vocab_size() == NUM_TOKENS
