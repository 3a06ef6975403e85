"""What `launch` refuses, what it sends, and how failures read."""

import linecache
import os
import sys
import tempfile
import textwrap
import threading
import types

import cloudpickle
import pytest

from labkit.parallel import process
from labkit.parallel.communication.slow_link import Place, SlowLink, slow_link
from labkit.parallel.failures import Failure, RankFailed, first_of
from labkit.parallel.group import node_of
from labkit.parallel.launch import launch
from labkit.parallel.outcome import Outcome, read_outcome, read_result, write_outcome
from labkit.parallel.packing import pack, unpack


@pytest.mark.parametrize(
    ("n_procs", "message"),
    [
        (0, "n_procs must be a whole number of at least 1; got 0. "),
        (2.0, "n_procs must be a whole number of at least 1; got 2.0. "),
        (True, "n_procs must be a whole number of at least 1; got True. "),
    ],
)
def test_a_wrong_number_of_processes_is_refused(n_procs, message, unchecked):
    with pytest.raises(ValueError) as caught:
        launch(os.getpid, n_procs)

    assert str(caught.value) == message + "Set n_procs to 1 or more."


def test_what_is_no_function_is_refused(unchecked):
    with pytest.raises(ValueError) as caught:
        launch("work", 2)

    assert str(caught.value) == (
        "fn must be a function that each rank calls; got 'work'. Give the function "
        "itself, and its arguments after n_procs."
    )


def test_a_timeout_that_is_none_is_refused():
    with pytest.raises(ValueError, match="timeout must be above 0 and finite"):
        launch(os.getpid, 2, timeout=0.0)


def test_an_argument_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError) as caught:
        launch(print, 2, threading.Lock())

    assert str(caught.value) == (
        "fn and its arguments are sent to other processes, so they must be picklable; "
        "got TypeError: cannot pickle '_thread.lock' object. Make what cannot be sent "
        "(locks, open files, generators) inside fn."
    )


def test_ranks_that_do_not_fill_nodes_evenly_are_refused():
    link = SlowLink(bits_per_second=1e6, n_nodes=2, kind="modelled")

    with pytest.raises(ValueError) as caught:
        launch(os.getpid, 3, link=link)

    assert str(caught.value) == (
        "n_procs must be a multiple of the link's nodes, which have as many ranks "
        "each; got n_procs=3 for 2 nodes. Set n_procs=4."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits_per_second": 0.0}, "bits_per_second must be above 0"),
        ({"bits_per_second": 1.0, "n_nodes": 1}, "n_nodes must be a whole number"),
    ],
)
def test_a_link_that_joins_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message), slow_link(**options):
        pass


def test_the_first_ranks_are_the_first_node(monkeypatch):
    link = SlowLink(bits_per_second=1e6, n_nodes=2, kind="real", pids=(11, 22))
    places = [link.place(rank, 4) for rank in range(4)]

    assert [link.node_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert ["11" in place.prefix for place in places] == [True, True, False, False]
    assert ["22" in place.prefix for place in places] == [False, False, True, True]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [node_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_modelled_link_starts_ranks_where_we_are_and_says_why():
    link = SlowLink(bits_per_second=4e8, n_nodes=2, kind="modelled", why="no unshare")

    assert link.place(0, 2) == Place(n_nodes=2, bits_per_second=4e8, is_timed=True)
    assert repr(link) == "SlowLink(2 nodes, 400 Mbit/s, modelled: no unshare)"


def failure(rank: int, kind: str, seconds: float = float("inf")) -> Failure:
    return Failure(rank=rank, kind=kind, what=f"was {kind}", seconds=seconds)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, "raised", 2.0), failure(1, "raised", 1.0)], 1),
        ([failure(0, "echo", 1.0), failure(1, "raised", 2.0)], 1),
        ([failure(0, "echo", 1.0), failure(1, "hung")], 1),
        ([failure(0, "raised", 1.0), failure(1, "killed")], 1),
        ([failure(0, "aborted"), failure(1, "raised", 1.0)], 1),
        ([failure(0, "echo", 1.0), failure(1, "aborted")], 1),
    ],
)
def test_the_first_failure_is_the_one_that_the_others_follow_from(failures, rank):
    assert first_of(failures).rank == rank
    assert first_of(failures[::-1]).rank == rank


def test_an_error_names_the_rank_the_step_and_where_it_was():
    first = Failure(
        rank=1,
        kind="raised",
        what="raised ValueError: no",
        trace="Traceback:\n  line 3\n",
        step=7,
        printed="step 7",
        log="logs/rank1.log",
    )
    error = RankFailed(first, [failure(0, "echo")], 2)

    assert str(error) == textwrap.dedent("""\
        rank 1 of 2 raised ValueError: no (at step 7)

        Traceback:
          line 3

        Last printed by rank 1:
        step 7

        What followed elsewhere:
          rank 0 was echo

        Its log: logs/rank1.log""")
    assert str(cloudpickle.loads(cloudpickle.dumps(error))) == str(error)


def test_a_long_message_is_shortened_in_the_first_line():
    first = Failure(rank=0, kind="raised", what="raised " + "word " * 500)

    assert len(first.line) < 300
    assert first.line.endswith("word …")


ANSWER = """\
Thread 0x00007f (most recent call first):
  File "/x/labkit/parallel/worker.py", line 150 in _watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007e (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2799 in recv
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/work.py", line 21 in work
  File "/x/labkit/parallel/worker.py", line 61 in _result
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_calls_of_a_rank_that_hangs_are_those_of_its_work():
    calls = process._calls(ANSWER)

    assert calls.splitlines()[1:] == ANSWER.splitlines()[5:8]
    assert process._waits(calls)
    assert not process._waits(process._calls(ANSWER.replace("torch/distributed", "z")))


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        (0, ("left", "left with exit status 0 and without a result")),
        (-9, ("killed", "was killed by SIGKILL, as happens when memory runs out")),
        (-11, ("killed", "was killed by SIGSEGV")),
        (-6, ("aborted", "was aborted by a library it runs (SIGABRT)")),
    ],
)
def test_a_process_without_a_result_is_told_by_its_status(status, ending):
    assert process._ending(status) == ending


def test_an_outcome_is_complete_or_absent():
    outcome = Outcome(kind="returned", n_bytes=5)
    with tempfile.TemporaryFile() as file:
        assert read_outcome(file.fileno()) is None
        write_outcome(file.fileno(), outcome, b"12345")
        assert read_outcome(file.fileno()) == outcome
        assert read_result(file.fileno()) == b"12345"
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - 1)
        assert read_outcome(file.fileno()) is None


def test_functions_of_a_module_that_no_other_process_finds_travel_by_value(tmp_path):
    source = "def third(n):\n    return n // factor\n\nfactor = 3\n"
    path = tmp_path / "module_of_no_path.py"
    path.write_text(source, encoding="utf-8")
    module = types.ModuleType("module_of_no_path")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    sys.modules[module.__name__] = module
    try:
        with tempfile.TemporaryFile() as file:
            pack(module.third, (12,), file)
            file.seek(0)
            packed = file.read()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]

    fn, args = unpack(packed)
    assert fn(*args) == 4
    assert fn.__code__.co_filename == str(path)


def test_the_source_of_a_notebook_cell_travels_along():
    name = "<cell 7 of a notebook>"
    lines = ["def f():\n", "    return 1\n"]
    linecache.cache[name] = (20, None, lines, name)
    try:
        with tempfile.TemporaryFile() as file:
            pack(os.getpid, (), file)
            file.seek(0)
            packed = file.read()
        del linecache.cache[name]
        unpack(packed)
        assert linecache.getline(name, 2) == lines[1]
    finally:
        linecache.cache.pop(name, None)
