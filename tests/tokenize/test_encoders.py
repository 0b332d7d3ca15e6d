"""The fast engine gives the reference's ids and masks where it is proven, and is refused or passed by elsewhere."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from draftmill.chat.chat import Chat, open_chat
from draftmill.chat.turns import RenderedTurns
from draftmill.tokenize.characters import DIFFERING, Characters
from draftmill.tokenize.encoders import Encoded, FastEncoder, ReferenceEncoder, Unproven, open_encoder
from draftmill.tokenize.probe import in_context
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("t"), thinking=True)
    return _changed(folder, lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFC()))


def _changed(folder: Path, change) -> Path:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return open_chat(folder)


@pytest.fixture(scope="module")
def fast(folder: Path, chat: Chat) -> FastEncoder:
    return FastEncoder(chat, folder / "tokenizer.json")


LETTERS = (
    "aeiou thnrs\n\t.,<>|_éßñ漢字カ한글हिन्दी\u093cกำшжλω🙂🏽\u200d\u0301\u0323\u1161\u11a8\u212b\u00a0\u2028"
    + "0123456789'" * 2
)
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_end", "apple ", "assistant\n", "\n\n", "that's ")


def _text(rng: random.Random) -> RenderedTurns:
    """Random characters and marks, and answers that begin and end anywhere."""
    pieces = [rng.choice(MARKS) if rng.random() < 0.3 else rng.choice(LETTERS) for _ in range(rng.randrange(90))]
    text = "".join(pieces)
    places = sorted(rng.sample(range(len(text) + 1), min(2 * rng.randrange(3), len(text) + 1) // 2 * 2))
    spans = tuple(zip(places[::2], places[1::2], strict=True))
    return RenderedTurns(text, tuple(range(len(spans))), spans)


def _equal(ours: list[Encoded], theirs: list[Encoded]) -> bool:
    return all(a.equals(b) for a, b in zip(ours, theirs, strict=True))


def test_ids_and_masks_are_the_reference_s_for_any_text_and_any_border(chat: Chat, fast: FastEncoder):
    rng = random.Random(4)
    texts = [_text(rng) for _ in range(2000)]
    reference = ReferenceEncoder(chat)
    assert _equal(fast.encode(texts), reference.encode(texts))
    assert _equal([fast.encode([text])[0] for text in texts[:50]], reference.encode(texts[:50])), "alone as in a batch"
    assert fast.encode([]) == []


def test_a_token_that_straddles_a_border_is_not_supervised(chat: Chat, fast: FastEncoder):
    double = chat.encode("\n\n")
    assert len(double) == 1
    (made,) = fast.encode([RenderedTurns("a\n\nb", (0,), ((2, 4),))])
    assert made.loss_mask.tolist() == [False, False, True]
    (made,) = fast.encode([RenderedTurns("a\n\nb", (0,), ((0, 2),))])
    assert made.loss_mask.tolist() == [True, False, False]


def test_a_tokenizer_that_trims_offsets_hides_no_straddling_token(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    _changed(folder, lambda tokenizer: setattr(tokenizer, "post_processor", processors.ByteLevel(trim_offsets=True)))
    chat = open_chat(folder)
    assert len(chat.encode(" apple")) == 1
    for encoder in (ReferenceEncoder(chat), FastEncoder(chat, folder / "tokenizer.json")):
        (made,) = encoder.encode([RenderedTurns("x apple", (0,), ((2, 7),))])
        assert made.loss_mask.tolist() == [False, False]


def _points() -> list[int]:
    ranges = [given.partition("-") for given in DIFFERING.split()]
    return [point for first, _, last in ranges for point in (int(first, 16), int(last or first, 16))]


def test_characters_of_which_the_engines_think_differently_are_passed_by(chat: Chat, fast: FastEncoder):
    characters = Characters()
    texts = [RenderedTurns(f"a{chr(point)}b {chr(point)}1", (0,), ((1, 3),)) for point in _points()]
    assert not any(characters.are_trusted(turns.text) for turns in texts)
    assert _equal(fast.encode(texts), ReferenceEncoder(chat).encode(texts))


def test_the_engines_do_differ_there(chat: Chat, fast: FastEncoder):
    texts = [RenderedTurns(in_context(chr(point)), (), ()) for point in _points()]
    careless = [made for made in fast.encode_trusted(texts) if made is not None]
    reference = ReferenceEncoder(chat).encode(texts)
    assert sum(a.equals(b) for a, b in zip(careless, reference, strict=False)) < len(texts) / 2


def test_random_characters_of_all_of_unicode_are_read_alike(chat: Chat, fast: FastEncoder):
    rng = random.Random(7)
    points = [point for point in rng.sample(range(0x33000), 4000) if not 0xD800 <= point < 0xE000]
    texts = [RenderedTurns(in_context(chr(point)), (0,), ((2, 9),)) for point in points]
    assert _equal(fast.encode(texts), ReferenceEncoder(chat).encode(texts))


@pytest.mark.parametrize(
    ("text", "is_trusted"),
    [
        ("plain", True),
        ("café 漢字 한글 🙂 naïve", True),
        ("cafe\u0301", False),
        ("हिन्दी क\u093c", True),  # composed it would be longer, so it stays as it is
        ("\u0928\u093c", False),
        ("\u1100\u1161", False),
        ("a\u0323\u0307", False),
        ("q\u0323\u0307", True),
        ("q\u0307\u0323", False),
        ("\u0628\u064b\u0651", True),
        ("\u0628\u0651\u064b", False),  # marks that join nothing, out of order
        ("\u212b", False),
        ("\u2000", False),
        ("\ue000 \U000f0000", True),
        ("\u0378", False),  # not assigned
    ],
)
def test_only_composed_texts_of_known_characters_are_trusted(text: str, is_trusted: bool):
    assert Characters().are_trusted(text) == is_trusted
    if is_trusted:
        assert unicodedata.normalize("NFC", text) == text


def _refusal(folder: Path) -> str:
    with pytest.raises(Unproven) as refused:
        FastEncoder(open_chat(folder), folder / "tokenizer.json")
    return str(refused.value)


def test_a_tokenizer_of_another_kind_keeps_the_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_tiny_tokenizer(tmp_path)
    other = Tokenizer(models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(folder / "tokenizer.json"))
    assert "WordLevel" in _refusal(folder)
    assert isinstance(open_encoder(open_chat(folder), folder / "tokenizer.json"), ReferenceEncoder)
    assert "WordLevel" in caplog.text
    _changed(write_tiny_tokenizer(tmp_path), lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFKC()))
    assert "normalizer is NFKC" in _refusal(folder)


def test_an_engine_that_does_not_reproduce_the_reference_is_refused_with_a_probe(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path)
    chat = open_chat(folder)
    # Another file than the reference was opened with: two letters have each other's id.
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "other.json").write_text(json.dumps(content))
    with pytest.raises(Unproven, match=r"differs from tokenizers on \d+ of \d+ probes"):
        FastEncoder(chat, folder / "other.json")
