"""The figures of a tokenized set as a picture: `tokenize.svg`, beside the card, the same bytes for the same figures."""

from collections.abc import Iterator, Mapping
from html import escape

from draftmill.tokenize.figures import PartStats, bins
from draftmill.tokenize.histogram import summary

PICTURE_FILE = "tokenize.svg"
_WIDTH, _LABEL, _BAR, _LINE = 720, 130, 460, 20
_UP = 'transform="translate(0,-12)"'  # a bar's y is its top, a text's its foot
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.head{font-weight:600}.label{text-anchor:end}"
    ".supervised{fill:#2b8a3e}.length{fill:#4c6ef5}"
)


def picture(figures: PartStats, title: str) -> bytes:
    """Two histograms, supervised tokens and length per sample, and what else there is to say, as SVG."""
    rows = [
        *_text(title, "head"),
        *_bars("supervised tokens per sample", figures.supervised_counts, "supervised"),
        *_bars("tokens per sample", figures.length_counts, "length"),
        *(line for text in summary(figures).splitlines() for line in _text(text.strip(), "")),
    ]
    placed = "".join(row.replace("{y}", str(_LINE * (number + 1))) for number, row in enumerate(rows))
    height = _LINE * (len(rows) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{placed}</svg>\n'
    ).encode()


def _text(words: str, kind: str) -> Iterator[str]:
    yield f'<text x="12" y="{{y}}" class="{kind}">{escape(words)}</text>'


def _bars(title: str, counts: Mapping[int, int], kind: str) -> Iterator[str]:
    yield from _text(title, "head")
    groups = bins(counts)
    most, whole = max((count for *_, count in groups), default=1) or 1, sum(counts.values()) or 1
    for low, high, count in groups:
        label = f"{low:,}" if low == high else f"{low:,}\u2013{high:,}"
        length = round(_BAR * count / most, 1)
        yield (
            f'<text x="{_LABEL}" y="{{y}}" class="label">{label}</text>'
            f'<rect x="{_LABEL + 10}" y="{{y}}" width="{length}" height="14" {_UP} class="{kind}"/>'
            f'<text x="{_LABEL + 16 + length}" y="{{y}}">{count / whole:.1%}</text>'
        )
