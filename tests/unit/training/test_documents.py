import os
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.training.documents import Document, find_documents, split_documents


def write(folder: Path, **contents: bytes) -> Path:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def as_document(content: bytes) -> Document:
    return Document(Path("x"), sha256(content).digest(), len(content))


def test_documents_come_in_path_order_at_every_depth(tmp_path):
    write(tmp_path, b_txt=b"b", a__z_txt=b"z", c__d__e_txt=b"e")
    found = find_documents(tmp_path)
    paths = [d.path.relative_to(tmp_path).as_posix() for d in found.documents]
    assert paths == ["b.txt", "a/z.txt", "c/d/e.txt"]


def test_binary_and_other_encodings_are_skipped_and_counted(tmp_path):
    write(
        tmp_path,
        a_txt=b"text",
        b_bin=b"one\0two",
        c_txt="déjà".encode("latin-1"),
        d_txt="déjà".encode(),
    )
    found = find_documents(tmp_path)
    assert [d.path.name for d in found.documents] == ["a.txt", "d.txt"]
    assert found.n_skipped == 2


def test_empty_files_and_copies_are_passed_over_without_count(tmp_path):
    write(tmp_path, a_txt=b"same", b_txt=b"same", c_txt=b"")
    found = find_documents(tmp_path)
    assert [d.path.name for d in found.documents] == ["a.txt"]
    assert found.n_skipped == 0


def test_hidden_and_named_folders_and_other_suffixes_are_left_out(tmp_path):
    write(tmp_path, a_py=b"a", b_txt=b"b", tests__c_py=b"c", x__y__d_py=b"d")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "e.py").write_bytes(b"e")
    found = find_documents(tmp_path, suffix=".py", skip={"tests"})
    assert [d.path.name for d in found.documents] == ["a.py", "d.py"]


def test_an_unreadable_file_is_skipped(tmp_path, monkeypatch):
    write(tmp_path, a_txt=b"a", b_txt=b"b")
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "a.txt":
            raise PermissionError(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    found = find_documents(tmp_path)
    assert [d.path.name for d in found.documents] == ["b.txt"]
    assert found.n_skipped == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_skipped_instead_of_waited_for(tmp_path):
    write(tmp_path, a_txt=b"a")
    os.mkfifo(tmp_path / "pipe")
    assert find_documents(tmp_path).n_skipped == 1


contents = st.lists(
    st.binary(min_size=1, max_size=8), min_size=2, max_size=12, unique=True
)


@given(contents, st.floats(0, 0.99))
def test_every_byte_has_one_side_and_no_side_is_empty(items, fraction):
    documents = tuple(as_document(item) for item in items)
    train, valid = split_documents(documents, fraction)
    assert sum(p.stop - p.start for p in train + valid) == sum(map(len, items))
    starts = sorted((p.document.digest, p.start) for p in train + valid)
    assert len(set(starts)) == len(starts)
    assert {p.document for p in train + valid} == set(documents)
    assert train and valid and all(p.stop > p.start for p in valid)


@pytest.mark.parametrize("sizes", [(260_000, 300), (5000, 5001), (9000, 10, 20, 30)])
def test_few_unequal_documents_leave_the_wanted_share_for_validation(sizes):
    for seed in range(8):  # whatever their digests
        documents = tuple(as_document(bytes([97 + seed]) * size) for size in sizes)
        train, valid = split_documents(documents, 0.05)
        (piece,) = valid
        assert piece.document.n_bytes == piece.stop == max(sizes)
        assert piece.stop - piece.start == sum(sizes) // 20
        assert [p.document for p in train] == list(documents)


def test_a_document_keeps_its_side_when_others_join():
    documents = tuple(as_document(b"document %d" % i) for i in range(200))
    _, few = split_documents(documents[:100], 0.1)
    _, many = split_documents(documents, 0.1)
    assert {p.document for p in few} == {
        p.document for p in many if p.document in documents[:100]
    }
    assert 10 < len(many) < 30


def test_a_single_document_is_cut_near_its_end():
    train, valid = split_documents((as_document(b"x" * 200),), 0.05)
    assert [(p.start, p.stop) for p in train + valid] == [(0, 190), (190, 200)]
