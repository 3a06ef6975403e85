"""What a notebook cell shows: a page for the eye, one line for the test.

Every output of the book carries `text/html` for readers with or without a kernel
and one `text/plain` line that nbval compares. A live widget may ride along; it is
shown instead of the page where a kernel runs, and is never stored.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.display import display
from ipywidgets import Widget

VARIES = {"labkit": {"varies": True}}
"""Output metadata: numbers on this page differ from run to run; see `runner`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One output of a cell: `text` for tests, `html` for the page, `live` to act on."""

    text: str
    html: str = ""
    live: Widget | None = None
    varies: bool = False
    """Whether the page holds numbers that differ from run to run (`varying`)."""

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the output's forms by media type, and its metadata."""
        data = {"text/plain": self.text}
        if self.html:
            data["text/html"] = self.html
        if self.live is not None:
            widget = self.live._repr_mimebundle_()
            data |= {kind: widget[kind] for kind in widget if "widget-view" in kind}
        return data, VARIES if self.varies else {}


def show(shown: Shown) -> None:
    """Put one output on the page, wherever in the cell the call stands."""
    display(shown)


def show_line(text: str, *, tone: str = "plain") -> None:
    """Put one line on the page, coloured by `tone`: plain, good, bad or quiet."""
    show(Shown(text=text, html=line_html(text, tone=tone)))


_TONES = {
    "plain": "",
    "good": "border-left:4px solid #009E73;",
    "bad": "border-left:4px solid #D55E00;",
    "quiet": "border-left:4px solid #999999;",
}


def line_html(text: str, *, tone: str = "plain", safe: bool = False) -> str:
    """Return one line as a paragraph; `safe` text is HTML already.

    The tone only tints the edge: the words and their mark carry the meaning.
    """
    edge = _TONES[tone] + ("padding-left:10px;" if _TONES[tone] else "")
    body = text if safe else escape(text)
    return f'<p style="margin:4px 0;{edge}">{body}</p>'


def varying(text: str) -> str:
    """Return HTML for a measured number, marked so that tests do not compare it.

    >>> varying("12.3 ms")
    '<data class="varies">12.3 ms</data>'
    """
    return f'<data class="varies">{escape(text)}</data>'
