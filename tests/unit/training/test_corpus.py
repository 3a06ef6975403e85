import logging

import numpy as np
import pytest

from labkit.training import corpus as corpora
from labkit.training.corpus import SEPARATOR, decode, from_folder, reopen


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_the_stream_is_the_documents_each_closed_by_the_separator(text_folder, cache):
    corpus = from_folder(text_folder, cache=cache)
    stream = bytes(corpus.train) + bytes(corpus.valid)
    texts = [path.read_bytes() for path in text_folder.iterdir()]
    assert sorted(stream.split(b"\0")) == sorted([*texts, b""])
    assert SEPARATOR == 0


def test_tokens_are_mapped_from_a_file_that_the_second_reader_shares(
    text_folder, cache
):
    first = from_folder(text_folder, cache=cache)
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    second = from_folder(text_folder, cache=cache)
    assert isinstance(first.train, np.memmap)
    assert [path.name for path in cache.iterdir()] == [file.name]
    assert file.stat().st_mtime_ns == written
    np.testing.assert_array_equal(first.train, second.train)
    assert bytes(first.train) + bytes(first.valid) == file.read_bytes()


def test_a_truncated_token_file_is_written_anew(text_folder, cache):
    whole = bytes(from_folder(text_folder, cache=cache).train)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:10])
    assert bytes(from_folder(text_folder, cache=cache).train) == whole


def test_an_unwritable_cache_keeps_tokens_in_memory_and_says_so(
    text_folder, cache, caplog
):
    mapped = from_folder(text_folder, cache=cache)
    blocked = cache.with_name("blocked")
    blocked.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        corpus = from_folder(text_folder, cache=blocked)
    assert "tokens are kept in memory, not in a file" in caplog.text
    assert bytes(corpus.train) == bytes(mapped.train)


def test_the_fingerprint_follows_the_content_not_the_place(text_folder, cache):
    here = from_folder(text_folder, cache=cache)
    there = from_folder(text_folder.rename(text_folder.with_name("moved")), cache=cache)
    assert there.fingerprint == here.fingerprint
    (there.folder / "6.txt").write_text("one more")
    assert from_folder(there.folder, cache=cache).fingerprint != here.fingerprint


def test_reopen_finds_the_same_text(text_folder, cache):
    corpus = from_folder(text_folder, cache=cache)
    again = reopen(corpus.source, cache=cache)
    assert (again.folder, again.fingerprint) == (text_folder, corpus.fingerprint)


def test_reopen_refuses_a_text_that_changed(text_folder, cache):
    source = from_folder(text_folder, cache=cache).source
    (text_folder / "0.txt").write_text("other words")
    changed = from_folder(text_folder, cache=cache).fingerprint
    with pytest.raises(ValueError) as error:
        reopen(source, cache=cache)
    assert str(error.value) == (
        "the text of text changed since the run began: its fingerprint is "
        f"{changed[:12]}, not {source['fingerprint'][:12]}. "
        "Restore the text, or start a new run."
    )


def test_a_text_that_changed_leaves_no_token_file(text_folder, tmp_path, cache):
    source = from_folder(text_folder, cache=cache).source
    (text_folder / "0.txt").write_text("other words")
    with pytest.raises(ValueError):
        reopen(source, cache=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_text_too_short_for_the_run_leaves_no_token_file(text_folder, cache):
    with pytest.raises(ValueError) as error:
        from_folder(text_folder, seq_len=221, cache=cache)
    assert str(error.value) == (
        "the validation text is too short: a window needs seq_len + 1 = 222 bytes, "
        "but only 221 are there. Give more text, or set seq_len=220 or less."
    )
    assert not cache.exists()
    assert len(from_folder(text_folder, seq_len=220, cache=cache).valid) == 221


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError) as error:
        from_folder(tmp_path / "nowhere")
    assert str(error.value) == (
        f"corpus folder not found: {tmp_path / 'nowhere'}. "
        "Give a folder that holds text files."
    )


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError) as error:
        from_folder(tmp_path / "a.txt")
    assert str(error.value) == (
        f"a corpus is a folder, but {tmp_path / 'a.txt'} is a file. Give {tmp_path}."
    )


@pytest.mark.parametrize(("content", "n_skipped"), [(b"\0\1\2", 1), (b"", 0)])
def test_a_folder_without_text_is_named(tmp_path, content, n_skipped):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError) as error:
        from_folder(tmp_path)
    assert str(error.value) == (
        f"no text found below {tmp_path}: {n_skipped} files were skipped as binary, "
        "unreadable or not UTF-8. Give a folder that holds text files."
    )


def test_the_standard_library_is_python_source_without_its_tests(tmp_path):
    corpus = corpora.standard_library(cache=tmp_path)
    text = bytes(corpus.train) + bytes(corpus.valid)
    assert b"class Thread:\n" in text  # threading.py
    assert b"class Test_TestCase(" not in text  # unittest/test
    assert 5e6 < len(text) < 30e6
    assert 0.01 < len(corpus.valid) / len(text) < 0.15
    assert corpus.folder is None


def test_the_representation_counts_documents_and_bytes(text_folder, cache):
    corpus = from_folder(text_folder, cache=cache)
    assert repr(corpus) == (
        f"Corpus(text: 6 documents, {len(corpus.train):,} training and "
        f"{len(corpus.valid):,} validation bytes)"
    )


def test_decode_shows_a_cut_character_as_a_replacement():
    assert decode(corpora.encode("é")[:1]) == "�"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loop", "Symlink loop|Too many levels of symbolic links"),
        ("~nosuchuser/x", "Could not determine home directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_sentence(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=f"(?s)corpus folder not found: .*({reason})"):
        from_folder(name)


def test_without_a_home_tokens_are_kept_in_memory(text_folder, monkeypatch, caplog):
    def no_home() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    corpus = from_folder(text_folder)
    assert "tokens are kept in memory, not in a file: there is no" in caplog.text
    assert len(corpus.valid) == 221
