"""Text that a model wrote, on the page: it differs from machine to machine."""

from collections.abc import Mapping
from html import escape

from labkit.workbook.display import Shown, varying


def samples(texts: Mapping[str, str]) -> Shown:
    r"""Return texts one below the other, each under its name, for the page only.

    Control characters show as `·`, so that text from a model that knows nothing does
    not break the page.
    """
    blocks = [
        f"<p style='margin:4px 0'>{escape(name)}</p>"
        '<pre style="border-left:4px solid #56B4E9;padding-left:10px;'
        f'white-space:pre-wrap">{varying(printable(text))}</pre>'
        for name, text in texts.items()
    ]
    line = " · ".join(f"{name}: (text varies)" for name in texts)
    return Shown(text=line, html="".join(blocks), varies=True)


def printable(text: str) -> str:
    r"""Return the text with everything that has no shape on a page as a dot.

    >>> printable("def f():\n\treturn 'é\x00\ufffd'")
    "def f():\n    return 'é··'"
    """
    spaced = text.expandtabs(4)
    return "".join(
        letter if letter == "\n" or (letter.isprintable() and letter != "�") else "·"
        for letter in spaced
    )
