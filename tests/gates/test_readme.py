"""What README says is so: its examples, its commands, its table of notebooks."""

import argparse
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = sorted(set(re.findall(r"-m labkit (\w+)((?: --?[\w-]+[^\n`]*)?)", README)))


def test_the_python_examples_print_what_they_show():
    outcome = doctest.testfile(str(ROOT / "README.md"), module_relative=False)

    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize(("name", "options"), COMMANDS)
def test_every_command_and_its_options_exist(name, options):
    from labkit.__main__ import COMMANDS as known

    assert name in known
    parser = argparse.ArgumentParser()
    importlib.import_module(f"labkit.commands.{name}").add_arguments(parser)
    for option in re.findall(r"--[\w-]+", options):
        assert option in parser._option_string_actions


def test_the_readme_names_a_command():
    assert COMMANDS


def test_every_link_inside_the_repository_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_picture_has_an_alternative_text():
    assert re.findall(r"!\[\s*\]\(", README) == []


def test_the_table_of_notebooks_is_that_of_their_headers():
    from labkit.workbook.runner import table_markdown

    shown = re.search(
        r"<!-- notebooks -->\n(.*?)\n<!-- end of notebooks -->", README, re.DOTALL
    )[1]
    assert shown == table_markdown(), "refresh it: make notebooks"
