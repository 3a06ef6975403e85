"""Messages of the library in the words of the command line."""

import re
from collections.abc import Mapping


def in_options(message: str, terms: Mapping[str, str]) -> str:
    r"""Return the message with each term replaced by its option.

    A term is a regular expression of whole words; in a path or in quotes it stays.

    >>> terms = {"seq_len": "--seq-len", r"resume\('(.*?)'\)": r"--resume \1"}
    >>> in_options("Set seq_len=64, or resume('runs/seq_len').", terms)
    'Set --seq-len=64, or --resume runs/seq_len.'
    """
    for term, option in terms.items():
        message = re.sub(rf"(?<![\w/.'-]){term}(?![\w/'-]|\.\w)", option, message)
    return message
