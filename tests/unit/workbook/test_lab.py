"""Guesses, reveals, tables, measured numbers: what is shown and what is compared."""

import pytest

from labkit.workbook import lab
from labkit.workbook.display import VARIES, Shown
from labkit.workbook.guess import Guess, read_number, verdict
from labkit.workbook.spelling import spell


def bundle(shown):
    return shown._repr_mimebundle_()


def number(value=None, unit="GB"):
    guess = Guess("GB kept to train one layer", unit=unit)
    if value is not None:
        guess.enter(value)
    return guess


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (None, "○ no guess yet · it is 2.62 GB"),
        (0.4, "you said 0.4 GB, it is 2.62 GB: your guess is 6.5 times too low"),
        (26.2, "you said 26.2 GB, it is 2.62 GB: your guess is 10 times too high"),
        (2.5, "you said 2.5 GB, it is 2.62 GB: within a tenth"),
        (2.62, "you said 2.62 GB, it is 2.62 GB: exactly"),
        (0, "you said 0 GB, it is 2.62 GB: your guess is too low"),
    ],
)
def test_a_reveal_sets_the_guess_beside_the_value(said, line):
    assert verdict(number(said), 2.62) == line


def test_a_choice_is_right_or_not():
    guess = Guess("what limits decoding", choices=("compute", "memory"))
    assert verdict(guess, "memory") == "○ no guess yet · it is memory"
    guess.enter("compute")
    assert verdict(guess, "memory") == "you chose compute, it is memory"
    guess.enter("memory")
    assert verdict(guess, "memory") == "you chose memory: right"


def test_a_guess_that_is_no_number_is_no_guess_and_says_so():
    guess = number("lots")
    assert guess.value is None
    assert "&#x27;lots&#x27; is not a number" in guess._note.value


def test_a_guess_in_another_unit_is_told_which_one_counts():
    guess = number("1.3 TB")
    assert guess.value is None
    assert "write it as 0.4, 1,300 or 1e9, in GB." in guess._note.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.4", 0.4), (" 1,024 ", 1024.0), ("3 GB", 3.0), ("1e9", 1e9)),
        *(("-1,342,000.5", -1_342_000.5), ("70_272", 70_272.0), ("1,300e3", 1.3e6)),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert read_number(text, "GB") == value


@pytest.mark.parametrize("text", ["", "1,3e3", "0,4", "1,34", "13,00,000", "nan", "GB"])
def test_what_may_mean_another_number_is_none(text):
    assert read_number(text, "GB") is None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, for where progress is kept."""
    monkeypatch.setattr("labkit.workbook.progress.cache_folder", lambda: tmp_path)
    return tmp_path


def test_starting_progress_says_where_it_is_kept_and_turns_the_table(
    cache, monkeypatch, capsys
):
    shown = []
    monkeypatch.setattr(lab, "show", shown.append)
    kept = lab.progress()
    assert "Solved exercises are not kept." in shown[0].live.value
    kept.start()

    path = cache / "progress.json"
    said = capsys.readouterr().out
    assert said == f"Solved exercises are kept in {path}: 0 so far.\n"
    assert "not kept" not in shown[0].live.value
    assert "<th>solved</th>" in shown[0].live.value
    kept.reset()
    assert "Solved exercises are not kept." in shown[0].live.value


def test_a_revealed_line_follows_a_later_guess_on_the_page():
    guess = number()
    shown = lab.reveal(guess, 2.62)
    assert "no guess yet" in shown.live.value
    guess.enter(2.6)
    assert "within a tenth" in shown.live.value


def test_a_varying_value_is_on_the_page_but_not_in_the_text():
    shown = lab.reveal(number(unit="ms"), 12.345, varies=True)
    data, metadata = bundle(shown)

    assert "12" not in data["text/plain"]
    assert (
        '<data class="varies">○ no guess yet · it is 12.3 ms</data>'
        in (data["text/html"])
    )
    assert metadata == VARIES


def test_a_measured_line_keeps_its_number_out_of_the_text():
    data, metadata = bundle(lab.measured("matrix product", "81.5 GFLOP/s"))

    assert data["text/plain"] == "matrix product: (measured)"
    assert '<data class="varies">81.5 GFLOP/s</data>' in data["text/html"]
    assert metadata == VARIES


def test_a_table_aligns_numbers_right_and_words_left():
    shown = lab.compare(
        [
            {"model": "MHA", "bytes per token": 4997120, "fits": False},
            {"model": "MLA of V3", "bytes per token": 70272, "fits": True},
        ]
    )

    assert repr(shown) == (
        "model      bytes per token  fits\n"
        "MHA              4,997,120    no\n"
        "MLA of V3           70,272   yes"
    )
    assert bundle(shown)[1] == {}


def test_a_column_that_varies_is_shown_and_not_compared():
    data, metadata = bundle(
        lab.compare([{"op": "matmul", "ms": 1.2345}], varies=["ms"])
    )

    assert data["text/plain"] == "op              ms\nmatmul  (measured)"
    assert '<data class="varies">1.23</data>' in data["text/html"]
    assert metadata == VARIES


def test_html_in_a_table_is_text():
    assert "<b>" not in lab.compare([{"a<b>": "<b>x"}]).html


@pytest.mark.parametrize(
    ("rows", "varies", "message"),
    [
        ([], [], "a table needs at least one row; got none."),
        (
            [{"a": 1}, {"b": 2}],
            [],
            "all rows must have the columns ['a']; one has ['b']. "
            "Put None where there is no value.",
        ),
        ([{"a": 1}], ["ms"], "varies must name columns of the table; ['ms'] are none."),
    ],
)
def test_a_table_that_cannot_be_is_refused(rows, varies, message):
    with pytest.raises(ValueError) as error:
        lab.compare(rows, varies=varies)
    assert str(error.value) == message


def test_a_guess_box_has_a_line_for_readers_without_a_kernel(capsys):
    lab.guess("GB kept to train one layer", unit="GB")
    assert "Your guess: GB kept to train one layer (GB)" in capsys.readouterr().out


def test_a_live_output_carries_three_forms():
    guess = number()
    data, _ = bundle(lab.reveal(guess, 2.62))

    assert set(data) == {
        "text/plain",
        "text/html",
        "application/vnd.jupyter.widget-view+json",
    }


def test_text_alone_needs_no_html():
    assert bundle(Shown(text="one line")) == ({"text/plain": "one line"}, {})


def test_whole_numbers_keep_all_their_digits():
    assert spell(671_026_419_200) == "671,026,419,200"
