"""Text that a model wrote, on the page: it differs from machine to machine."""

from collections.abc import Mapping
from html import escape

from labkit.workbook.display import Shown, varying


def samples(texts: Mapping[str, str]) -> Shown:
    """Return texts one below the other, each under its name, for the page only."""
    blocks = [
        f"<p style='margin:4px 0'>{escape(name)}</p>"
        '<pre style="border-left:4px solid #56B4E9;padding-left:10px;'
        f'font-family:monospace;white-space:pre-wrap">{varying(printable(text))}</pre>'
        for name, text in texts.items()
    ]
    line = " · ".join(f"{name}: (text varies)" for name in texts)
    return Shown(text=line, html="".join(blocks), varies=True)


def printable(text: str) -> str:
    r"""Return the text with all but plain letters and line ends as dots.

    A model that knows nothing writes every byte, also those that would break a page.

    >>> printable("def f():\n\treturn 'é\x00'")
    "def f():\n    return '··'"
    """
    return "".join(
        letter if letter == "\n" or (letter.isascii() and letter.isprintable()) else "·"
        for letter in text.expandtabs(4)
    )
