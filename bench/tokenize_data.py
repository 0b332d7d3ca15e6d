"""Completions in the shape of a real set, made by this script alone: the same bytes for the same number of rows.

35 % code (windows of Python's own standard library), 25 % mathematics, 20 % prose in 26 languages, 20 % English (the
standard library's manual); 25 % with a system prompt, 6 % of several turns, every answer with reasoning. Lengths are
log-normal, so that Qwen3.6 counts a median of about 1,700 and a mean of about 2,000 tokens a row. Words are drawn from
vocabularies of thousands, for an engine that remembers words must not see the same few again and again.
`python bench/tokenize_data.py FILE [rows]`
"""

import json
import math
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

ROWS = 20_000
SEED = 20_261_129
MEDIAN_BYTES, SIGMA = 5_300, 0.5
MIN_BYTES, MAX_BYTES = 400, 38_000
SYSTEM_FRAC, SEVERAL_TURNS_FRAC = 0.25, 0.06
KINDS = {"code": 35, "mathematics": 25, "languages": 20, "english": 20}
VOCABULARY_WORDS = 6_000

# Syllables of 26 languages, roughly as they are written; words of them have real lengths and scripts, and no meaning.
SYLLABLES = {
    "de": "be ge ver ung keit lich schaft auf zu ein der stei müh größ straß über wahr sicht hand lung zeit räum",
    "fr": "con dé ré tion ment eau quel œu vre pro chaîn été où ça les jour nou velle par tir grâ ce phi lo",
    "es": "ción mente qué ni ño se ñor ra pa la bra ma ña na co ra zón im por tan te ár bol ca mi no",
    "it": "zione mente per ché più città gio van ni fa mi glia cuo re bel lez za pro get to so cie tà",
    "pt": "ção mente não vo cê co ra ção pos sí vel ma nhã tra ba lho a mi go ci da de me lhor",
    "nl": "heid lijk ver ge schap uit voor mo ge zij gezel lig mens water huis straat goed kijk",
    "sv": "het lig för må än dring sam hälle barn skog väg ljus dröm öppen kän sla frå ga",
    "da": "hed lig for æn dring sam fund børn skov vej lys drøm åben føl else spørgs mål",
    "nb": "het lig for en dring sam funn barn skog vei lys drøm åpen føl else spørs mål",
    "fi": "ssa llä kun nan hyvä päi vä yö työ maa ilma met sä kau pun ki ih mi nen kir ja",
    "pl": "ość ność prze szczę ście ży cie dzień mia sto wiel ki książ ka świat po go da łąk",
    "cs": "ost ní pře ště stí ži vot den mě sto vel ký kni ha svět po ča sí řek louk",
    "hu": "ság ség meg bol dog élet nap vá ros nagy könyv vi lág idő já rás folyó mező gyö",
    "ro": "ție tate în pre ună viață zi oraș mare carte lu me vre mea râu câmp fe ri ci re",
    "tr": "lık lik mut lu yaşam gün şe hir bü yük ki tap dün ya ha va ne hir ğı ça yır",
    "vi": "nghiệp trường người việc đường thành phố sách cuộc sống hạnh phúc thời tiết sông",
    "id": "kan nya per ber men ke ba ha gia hi dup ha ri ko ta be sar bu ku du nia cua ca",
    "ru": "ость ние пре сча стье жизнь день го род боль шой кни га мир по го да ре ка луг явля ется",
    "uk": "ість ння пере ща стя життя день мі сто вели кий кни га світ по го да річ ка їжа ґан",
    "el": "της ση προ ευ τυ χία ζωή μέ ρα πό λη με γά λο βι βλί ο κόσ μος και ρός πο τά μι",
    "ar": "ال مد ينة كت اب حيا ة يوم كب ير عا لم جو نه ر سعا دة مع لو مات طر يق",
    "he": "ה עיר ספר חיים יום גדול עולם מזג נהר אושר מידע דרך בית ילד אור שאלה",
    "hi": "की का में जी वन दिन श हर बड़ा कि ताब दु निया मौ सम न दी खु शी जान कारी रास्ता",
    "th": "การ ความ สุข ชีวิต วัน เมือง ใหญ่ หนังสือ โลก อากาศ แม่น้ำ ข้อมูล ทาง บ้าน",
    "ja": "の は を に 人 生 日 都市 大きい 本 世界 天気 川 幸せ 情報 道 ます です こと プログラム データ",
    "zh": "的 是 在 人生 日子 城市 巨大 书籍 世界 天气 河流 幸福 信息 道路 我们 可以 因为 所以 问题 方法 计算",
}
UNSPACED = {"th", "ja", "zh"}
FORMULAS = (
    "\\frac{{d}}{{dx}} x^{{{a}}} = {a} x^{{{b}}}", "\\sum_{{k=1}}^{{{a}}} k = \\frac{{{a} \\cdot {b}}}{{2}} = {c}",
    "{a} \\times {b} = {c}", "x^2 - {a}x + {b} = 0 \\implies x = \\frac{{{a} \\pm \\sqrt{{{c}}}}}{{2}}",
    "\\int_0^{{{a}}} {b}x \\, dx = \\left[ \\frac{{{b}x^2}}{{2}} \\right]_0^{{{a}}}", "\\gcd({a}, {b}) \\mid {c}",
    "P(X = {a}) = \\binom{{{b}}}{{{a}}} p^{{{a}}} (1-p)^{{{c}}}", "{a} \\equiv {b} \\pmod{{{c}}}",
)  # fmt: skip
STEPS = (
    "Let's compute this step by step.", "First, note that", "Substituting back, we get", "Wait, let me double-check:",
    "So the answer so far is", "By induction on $n$ it follows that", "Hmm, that's not quite right. Since", "Therefore",
    "We need to find all integers with", "Now consider the case where", "This simplifies to", "Alternatively,",
)  # fmt: skip
ASKS = (
    "Explain this in detail, please.", "Fix the bug and show the whole function.", "Solve it and show every step.",
    "What does the following mean?", "Write a test for it.", "Summarize it in short.", "And if it were larger?",
)  # fmt: skip


class Texts:
    """Draws texts of each kind, of about so many bytes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(f for f in library.glob("*.py") if f.stat().st_size > 8_000)
        self.code = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
        self.manual = [topics[name] for name in sorted(topics)]
        self.vocabularies = {language: self._vocabulary(said.split()) for language, said in SYLLABLES.items()}

    def _vocabulary(self, syllables: list[str]) -> list[str]:
        return ["".join(self.rng.choices(syllables, k=self.rng.randint(1, 4))) for _ in range(VOCABULARY_WORDS)]

    def draw(self, kind: str, num_bytes: int) -> str:
        pieces, filled = [], 0
        while filled < num_bytes:
            piece = getattr(self, f"_{kind}")(num_bytes - filled)
            pieces.append(piece)
            filled += len(piece.encode()) + 1
        return "\n\n".join(pieces).strip() or "ok"

    def _code(self, num_bytes: int) -> str:
        text = self.rng.choice(self.code)
        start = self.rng.randrange(len(text))
        window = text[start : start + min(num_bytes, 4_000)]
        return f"```python\n{window}\n```"

    def _english(self, num_bytes: int) -> str:
        text = self.rng.choice(self.manual)
        start = self.rng.randrange(len(text))
        return text[start : start + min(num_bytes, 3_000)]

    def _mathematics(self, num_bytes: int) -> str:
        lines = []
        for _ in range(min(num_bytes, 2_000) // 80 + 1):
            a, b, c = (self.rng.randint(2, 10 ** self.rng.randint(1, 4)) for _ in range(3))
            formula = self.rng.choice(FORMULAS).format(a=a, b=b, c=c)
            lines.append(f"{self.rng.choice(STEPS)} ${formula}$.")
        return "\n".join(lines)

    def _languages(self, num_bytes: int) -> str:
        language = self.rng.choice(sorted(self.vocabularies))
        joint, words = "" if language in UNSPACED else " ", self.vocabularies[language]
        size = 12 if language in UNSPACED else 9
        said = []
        for _ in range(min(num_bytes, 2_000) // (size * 9) + 1):
            # Zipf's law, roughly: most words are common ones, a few come from the whole vocabulary.
            drawn = [words[int(len(words) ** self.rng.random()) - 1] for _ in range(self.rng.randint(5, 14))]
            said.append(joint.join(drawn).capitalize() + ("。" if language in ("ja", "zh") else "."))
        return " ".join(said)


def rows(num_rows: int, turns: int | None = None) -> Iterator[dict[str, object]]:
    """The rows, in order; `turns` gives every row so many."""
    rng = random.Random(SEED)
    texts = Texts(rng)
    for number in range(num_rows):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        num_turns = turns or (rng.randint(2, 5) if rng.random() < SEVERAL_TURNS_FRAC else 1)
        num_bytes = min(MAX_BYTES, max(MIN_BYTES, math.exp(rng.gauss(math.log(MEDIAN_BYTES), SIGMA)))) / num_turns
        messages = [{"role": "system", "content": texts.draw("english", 200)}] if rng.random() < SYSTEM_FRAC else []
        for _ in range(num_turns):
            messages += _turn(rng, texts, kind, num_bytes)
        yield {
            "id": f"row-{number:07}",
            "messages": messages,
            "finish_reason": "stop",
            "sampling": {"temperature": 1.0},
        }


def _turn(rng: random.Random, texts: Texts, kind: str, num_bytes: float) -> list[dict[str, str]]:
    """A question of a tenth of the bytes, reasoning of half, an answer of the rest."""
    question = f"{rng.choice(ASKS)}\n\n{texts.draw(kind, int(num_bytes * 0.1))}"
    reasoning, answer = texts.draw(kind, int(num_bytes * 0.5)), texts.draw(kind, int(num_bytes * 0.4))
    # As engines return them: what is thought ends in a line end, and so do some answers.
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, "reasoning_content": reasoning + "\n"},
    ]


def write(file: Path, num_rows: int, turns: int | None = None) -> Path:
    """The rows as a file of JSON lines."""
    with file.open("w", encoding="utf-8") as stream:
        for row in rows(num_rows, turns):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return file


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else ROWS)
    sizes = sorted(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows(200))
    print(json.dumps({"bench": "tokenize_data", "rows": 200, "bytes_p50": sizes[100], "bytes_max": sizes[-1]}))
