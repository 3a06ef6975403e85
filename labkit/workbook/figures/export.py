"""From a matplotlib figure to a page: small PNG, alt text, caption, one text line."""

import base64
import io
from html import escape

from matplotlib.figure import Figure
from PIL import Image

from labkit.workbook.display import Shown, show, varying
from labkit.workbook.figures.style import PIXELS_PER_INCH

MAX_PNG_BYTES = 100_000
"""Size that a stored figure may have, so that the repository stays small."""

LIVE_SCALE = 1.5
"""Pixels per page pixel while a control moves: sharp enough, and quick to draw."""


def png(fig: Figure, *, scale: float = 2.0, palette: bool = True) -> bytes:
    """Return the figure as PNG bytes, `scale` pixels for each one on the page.

    A palette of 64 colours makes the file about three times smaller; a live view
    leaves it out, as it costs a third of the drawing time.

    Raises:
        ValueError: a palette figure that is larger than `MAX_PNG_BYTES`.
    """
    raw = io.BytesIO()
    dpi = PIXELS_PER_INCH * scale
    fig.savefig(raw, format="png", dpi=dpi, metadata={"Software": None})
    if not palette:
        return raw.getvalue()
    small = io.BytesIO()
    image = Image.open(raw).convert("RGB")
    image = image.quantize(64, method=Image.Quantize.FASTOCTREE, dither=0)
    image.save(small, "png", optimize=True)
    if len(small.getvalue()) > MAX_PNG_BYTES:
        raise ValueError(
            f"a stored figure may take {MAX_PNG_BYTES:,} bytes; this one takes "
            f"{len(small.getvalue()):,}. Draw fewer points, or lower its height."
        )
    return small.getvalue()


def image_html(data: bytes, *, alt: str, width: int) -> str:
    """Return an `<img>` that holds its own data."""
    source = base64.b64encode(data).decode("ascii")
    return (
        f'<img alt="{escape(alt, quote=True)}" width="{width}" '
        f'style="max-width:100%" src="data:image/png;base64,{source}">'
    )


def figure_html(fig: Figure, *, alt: str, caption: str, measured: str = "") -> str:
    """Return the figure for a page without a kernel: image, alt text, caption."""
    width = round(fig.get_size_inches()[0] * PIXELS_PER_INCH)
    image = image_html(png(fig), alt=alt, width=width)
    note = f" {varying(measured)}" if measured else ""
    return (
        f'<figure style="margin:0">{image}'
        f"<figcaption>{escape(caption)}{note}</figcaption></figure>"
    )


def figure(fig: Figure, *, alt: str, caption: str, measured: str = "") -> None:
    """Show a figure with its alt text and caption.

    Args:
        fig: what a function of `figures` returned.
        alt: what a reader who cannot see the figure needs to know, in one line; it is
            compared by nbval, so it holds no number that varies.
        caption: what the figure shows and how it was made.
        measured: the numbers of this machine in one sentence; marks the output as
            one that differs from run to run.
    """
    page = figure_html(fig, alt=alt, caption=caption, measured=measured)
    show(Shown(text=f"Figure: {alt}", html=page, varies=bool(measured)))
