"""A small text of everything that tokenizers have been seen to disagree on; two engines must agree on all of it.

Made, not kept: the same on every host, whatever its Python's Unicode tables.
"""

from collections.abc import Iterable, Iterator

_PROSE = (
    "I'm sure they've said: \"we'll see\", SHE'D gone; it's O'Neil's.  Two spaces,\tTabs\t\tand trailing   \n",
    "Prices: $1,234.50 -- 12% off!!! 3.14159e-10 0xDEADBEEF 1_000_000 ²³ ½ №7 ٣٤٥ १२३ 一二三 Ⅷ",
    "L'été dernier, à Besançon, l'œuvre coûtait 12 € ; où ça ? «Là-bas», naïve façade — déjà-vu…",
    "Übergröße, Straße, ĲSSELMEER, ﬁne ligatures, İstanbul ığdır, ångström, Łódź, Ţară, Þórr, ſ",
    "Это является фактом; съешь ещё этих мягких французских булок. Ελληνικά: τὸ ὕδωρ, ΰ ΐ. Українська ґ",
    "人力资源 毛泽东 日本語のテキスト、カタカナ・ひらがな。 한국어 문장입니다. 繁體中文「引號」 ㈱ ㍿ ｆｕｌｌ",
    "हिन्दी में लिखा हुआ क़ख़ग़ वाक्य। বাংলা ভাষা ঢ়য়। தமிழ் மொழி. తెలుగు. മലയാളം. ภาษาไทยไม่มีช่องว่าง ລາວ ខ្មែរ မြန်မာ",
    "العربية مِن اليمين إلى اليسار، لا إله. עִבְרִית עם נִקּוּד. فارسی می‌خواهم. አማርኛ ቋንቋ። ქართული Հայերեն",
    "decomposed cafe\u0301 re\u0301sume\u0301 a\u0323\u0307 o\u0302\u0301 \u1112\u1161\u11ab",
    "\u212b \u2126 \u0958 q\u0307\u0323 \U0001d15e composed differently",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 1️⃣ ❤️ ☎︎ 🧑🏿‍🚀 ⟦𝔘𝔫𝔦𝔠𝔬𝔡𝔢⟧ 𝟘𝟙𝟚 𝓢𝓬𝓻𝓲𝓹𝓽",
    "zero\u200bwidth non\u00a0breaking soft\u00adhyphen \ufeffmark \u2028line\u2029paragraph",
    "next\u0085line \x00\x01\x1f\x7f\x80 \ufffd \ue000",
    "for (int i = 0; i < n; ++i) {\n\tif (a[i] != b[i] && !done) { x->y = &z; }\n    \t // ok\r\n}\r\n\r\n\r\n",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # noqa: E501\n\n\n@dataclass\nclass A:\n        pass\n \n  \n',
    "$\\sum_{i=1}^{n} \\frac{a_i^2}{\\sqrt{b_i}} \\le \\int_0^\\infty e^{-x^2}\\,dx$ \\[ x \\mapsto x' \\] ",
    "∀ε>0 ∃δ ∈ ℝ⁺: |x−a|<δ ⇒ |f(x)−f(a)|<ε; a≠b, c≤d, ½·π≈1.57, x⃗ ⊗ y⃗ → ∞",
    "SELECT * FROM `t` WHERE a<>'it''s' AND b IN (1,2);<div class=\"x\">&nbsp;</div>|a|b|\n|:-|-:|\n```json\n{}```",
    "https://example.org/a_b?c=%20d&e=f#g user@example.com C:\\Windows\\n ../.. #tag @name ~/.bashrc a--b __init__",
)
_RUNS = (" ", "\n", "\t", "a", "A", "1", ".", "-", "=", "é", "漢", "🙂", "\u0301", " \n", "ab", "\r\n", "'s", "x\u0301")
_RUN_LENGTHS = (2, 3, 4, 7, 16, 33, 1025)
# Of each block of so many code points, one; ideographs, Hangul syllables and private use are all alike.
_BLOCKS = (
    (range(0x3400), 128),
    (range(0x3400, 0xD800), 4096),
    (range(0xE000, 0x1FC00), 128),
    (range(0x1FC00, 0x110000), 16384),
)
_STEP = 23


def probe_texts(added_tokens: Iterable[str]) -> Iterator[str]:
    """The texts to compare; `added_tokens` are the tokenizer's own literals."""
    yield from _PROSE
    yield "".join(_PROSE)
    for unit in _RUNS:
        yield " ".join(unit * length for length in _RUN_LENGTHS)
        yield "\n".join(f"x{unit * length}y" for length in _RUN_LENGTHS[:-1])
    for token in added_tokens:
        yield f"a{token}b {token} {token}\n{token}{token} {token[:-1]} {token[1:]} {token.upper()}"


def probe_characters() -> Iterator[str]:
    """Characters from all over Unicode."""
    starts = [(start, points.stop, size) for points, size in _BLOCKS for start in points[::size]]
    for number, (start, stop, size) in enumerate(starts):
        yield chr(min(start + number * _STEP % size, stop - 1))


def in_context(character: str) -> str:
    """A character alone, doubled, and between letters, digits, punctuation, spaces and line ends."""
    c = character
    return f"a{c}b {c}{c} {c}1 A{c}é{c} '{c} {c}'s\n{c}\n\n{c} 漢{c}ก .{c}. \t{c} "
