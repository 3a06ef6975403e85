import argparse
import os
import subprocess
import sys

import pytest

from labkit import __main__ as entry
from labkit.commands import doctor


def test_without_a_command_the_commands_are_listed(capsys):
    status = entry.main([])

    assert status == 2
    printed = capsys.readouterr().out
    for name, text in entry.COMMANDS.items():
        assert f"{name:<12}{text}" in printed


def test_an_unknown_command_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main(["fly"])
    assert caught.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err


def test_a_command_gets_its_own_options(monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "run", lambda options: seen.append(options) or 0)

    assert entry.main(["doctor", "--seconds", "0.5"]) == 0
    assert seen == [argparse.Namespace(seconds=0.5)]


def test_a_command_explains_its_own_options(capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main(["doctor", "--help"])
    assert caught.value.code == 0
    assert "--seconds" in capsys.readouterr().out


def test_a_mistake_is_one_line_about_options_and_status_2(monkeypatch, capsys):
    def refuse(options):
        raise ValueError("seconds must be above 0; got -1. Set seconds=5 or so.")

    monkeypatch.setattr(doctor, "run", refuse)

    assert entry.main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        "labkit doctor: --seconds must be above 0; got -1. Set --seconds=5 or so.\n"
    )


def test_a_failing_disk_is_one_line_and_status_1(monkeypatch, capsys):
    def fail(options):
        raise OSError("no space left")

    monkeypatch.setattr(doctor, "run", fail)

    assert entry.main(["doctor"]) == 1
    assert capsys.readouterr().err == "labkit doctor: no space left\n"


def test_interrupting_a_command_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)

    assert entry.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_the_list_of_commands_needs_no_torch():
    program = "import sys, labkit.__main__; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_an_output_cannot_show_becomes_a_question_mark(encoding):
    program = """
from labkit import __main__ as entry
from labkit.commands import doctor
doctor.run = lambda options: print("a \\ufffd \\u4e2d b") or 0
entry.main(["doctor"])
"""
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert (shown.stdout.strip(), shown.stderr) == (b"a ? ? b", b"")
