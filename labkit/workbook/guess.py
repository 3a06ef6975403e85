"""A guess before a measurement: a box on the page that a later cell compares with."""

import re
from collections.abc import Callable, Sequence
from html import escape
from math import isfinite

from ipywidgets import HTML, Layout, RadioButtons, Text, VBox

from labkit.workbook.display import Shown, line_html, show, varying
from labkit.workbook.spelling import spell, spell_ratio

GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
"""A number whose thousands are separated by commas."""


class Guess:
    """What a reader expects, entered on the page; `value` is None until then."""

    def __init__(
        self, label: str, *, unit: str = "", choices: Sequence[str] = ()
    ) -> None:
        self.label, self.unit, self.choices = label, unit, tuple(choices)
        self._note = HTML()
        self._box = self._make_box()
        self._box.observe(self._acknowledge, "value")

    def __repr__(self) -> str:
        return f"guess {self.label!r}: {self.value}"

    def _ipython_display_(self) -> None:
        """Show nothing: the box is already on the page."""

    @property
    def value(self) -> float | str | None:
        """The number or the choice, None while there is none or it is no number."""
        entered = self._box.value
        if self.choices or entered is None:
            return entered
        return read_number(entered, self.unit)

    def enter(self, value: float | str) -> None:
        """Enter a guess from code, as if typed."""
        self._box.value = value if self.choices else str(value)

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Call back whenever the reader enters another guess."""
        self._box.observe(lambda _: callback(), "value")

    def show(self) -> None:
        """Put the box on the page."""
        what = " / ".join(self.choices) or self.unit
        text = f"Your guess: {self.label}" + (f" ({what})" if what else "")
        live = VBox([HTML(line_html(f"Your guess: {self.label}")), self._box])
        live.children += (self._note,)
        live.add_class("labkit-guess")
        show(Shown(text=text, html=line_html(text, tone="quiet"), live=live))

    def _make_box(self) -> Text | RadioButtons:
        if self.choices:
            return RadioButtons(
                options=list(self.choices),
                value=None,
                layout=Layout(width="max-content"),
            )
        return Text(
            placeholder="a number",
            description=self.unit,
            continuous_update=False,
            tooltip=self.label,
            style={"description_width": "initial"},
        )

    def _acknowledge(self, _: object) -> None:
        """Say under the box what was understood."""
        if self.value is None and self._box.value:
            unit = f", in {self.unit}" if self.unit else ""
            text = (
                f"{self._box.value!r} is not a number: write it as 0.4, 1,300 or 1e9"
                f"{unit}."
            )
        elif self.value is None:
            text = ""
        else:
            text = f"Noted: {self.spell(self.value)}. Now run the next cell."
        self._note.value = f'<p role="status" style="margin:2px 0">{escape(text)}</p>'

    def spell(self, value: float | str, *, digits: int = 3) -> str:
        """Return a value with the unit of this guess."""
        if isinstance(value, str):
            return value
        return f"{spell(value, digits=digits)} {self.unit}".rstrip()


def read_number(text: str, unit: str = "") -> float | None:
    """Return the number that a person wrote, None if it is none.

    Commas stand between groups of three digits only: "1,3" may mean 1.3.

    >>> read_number("70,272"), read_number("0.4 GB", "GB"), read_number("1,3e3")
    (70272.0, 0.4, None)
    """
    bare = text.strip().removesuffix(unit).strip()
    if "," in bare and not GROUPED.fullmatch(bare):
        return None
    try:
        number = float(bare.replace(",", ""))
    except ValueError:
        return None
    return number if isfinite(number) else None


def verdict(guess: Guess, value: float | str, *, digits: int = 3) -> str:
    """Return one line that sets the guess beside the value."""
    right = guess.spell(value, digits=digits)
    said = guess.value
    if said is None:
        return f"○ no guess yet · it is {right}"
    if isinstance(said, str) or isinstance(value, str):
        return (
            f"you chose {said}: right"
            if said == value
            else f"you chose {said}, it is {right}"
        )
    line = f"you said {guess.spell(said)}, it is {right}"
    if guess.spell(said, digits=digits) == right:
        return f"{line}: exactly"
    if abs(said - value) <= 0.1 * abs(value):
        return f"{line}: within a tenth"
    side = "too high" if said > value else "too low"
    if said <= 0 or value <= 0:
        return f"{line}: your guess is {side}"
    ratio = spell_ratio(max(said / value, value / said))
    return f"{line}: your guess is {ratio} {side}"


def reveal(
    guess: Guess, value: float | str, *, digits: int = 3, varies: bool = False
) -> Shown:
    """Return the output that sets the guess beside the value; see `lab.reveal`."""
    live = HTML()

    def update() -> None:
        live.value = (
            f'<p role="status">{escape(verdict(guess, value, digits=digits))}</p>'
        )

    update()
    guess.when_changed(update)
    line = verdict(guess, value, digits=digits)
    if not varies:
        return Shown(text=line, html=line_html(line), live=live)
    mark = "○ no guess yet" if guess.value is None else "your guess is in"
    page = line_html(varying(line), safe=True)
    text = f"{mark} · the value differs from machine to machine"
    return Shown(text=text, html=page, live=live, varies=True)
