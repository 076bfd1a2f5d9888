"""Tables of masks on disk: found again, checked before they are believed, bounded, shared by processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.masks.mask_store import MaskStore, vocabulary_digest
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary

WORDS = Vocabulary((b"a", b"b", b"ab", b""), frozenset({3}), frozenset({3}))


def arrays(seed, size=50):
    pick = np.random.default_rng(seed)
    return (
        pick.integers(0, 9, size, dtype=np.int64),
        pick.integers(0, 9, (3, size), dtype=np.uint32),
        pick.integers(0, 9, size, dtype=np.int8),
    )


def same(found, wanted):
    return found is not None and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


def test_what_is_saved_is_found_by_a_new_store(tmp_path):
    MaskStore(tmp_path / "new" / "folder", WORDS).save(b"key", arrays(1))
    store = MaskStore(tmp_path / "new" / "folder", WORDS)
    found = store.load(b"key")
    assert same(found, arrays(1))
    assert not found[0].flags.writeable
    assert store.load(b"other") is None


def test_another_vocabulary_finds_nothing(tmp_path):
    MaskStore(tmp_path, WORDS).save(b"key", arrays(1))
    for other in (
        Vocabulary((b"a", b"ba", b"b", b""), frozenset({3}), frozenset({3})),
        Vocabulary((b"a", b"b", b"ab", b""), frozenset({2, 3}), frozenset({3})),
        Vocabulary((b"a", b"b", b"ab", b""), frozenset({3}), frozenset()),
    ):
        assert vocabulary_digest(other) != vocabulary_digest(WORDS)
        assert MaskStore(tmp_path, other).load(b"key") is None


def test_a_damaged_file_is_made_anew(tmp_path):
    store = MaskStore(tmp_path, WORDS)
    store.save(b"key", arrays(1))
    path = store.path(b"key")
    whole = path.read_bytes()
    for at in range(0, len(whole), 13):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert store.load(b"key") is None
        path.write_bytes(whole[:at])
        assert store.load(b"key") is None
    path.write_bytes(whole + b"x")
    assert store.load(b"key") is None
    store.save(b"key", arrays(2))
    assert same(store.load(b"key"), arrays(2))


def test_the_folder_is_bounded(tmp_path):
    store = MaskStore(tmp_path, WORDS, limit_bytes=10_000)
    for number in range(30):
        store.save(str(number).encode(), arrays(number))
        os.utime(store.path(str(number).encode()), (number, number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 12_000
    assert store.load(b"29") is not None
    assert store.load(b"0") is None
    store.save(b"huge", (np.zeros(20_000, dtype=np.int64),))
    assert store.load(b"huge") is None


def test_writers_at_once_leave_whole_files(tmp_path):
    store = MaskStore(tmp_path, WORDS)

    def write(seed):
        for _ in range(20):
            store.save(b"key", arrays(seed, 2000))
            found = store.load(b"key")
            assert any(same(found, arrays(one, 2000)) for one in range(4))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be made"):
        MaskStore(tmp_path / "file" / "folder", WORDS)


def test_a_backend_reads_what_another_left(tmp_path, trained):
    vocabulary = trained("gpt2").vocabulary
    constraint = Constraint("regex", '"[^"]{0,60}"')

    def bits():
        backend = OutlinesGrammarBackend(vocabulary, grammar_cache_dir=str(tmp_path))
        matcher = backend.compile(constraint)
        assert matcher.advance_bytes(b'"')
        return matcher.mask().bits

    first = bits()
    (path,) = tmp_path.iterdir()
    made = path.stat().st_ino
    assert np.array_equal(bits(), first)
    assert path.stat().st_ino == made, "it was read, not written again"
    path.write_bytes(b"damaged")
    assert np.array_equal(bits(), first)
    assert path.stat().st_size > 100


def test_nothing_is_loaded_that_could_run_code():
    code = "import runtime.grammar.masks.mask_store as m; new = set(sys.modules) - before; "
    code += "assert not {'pickle', '_pickle'} & new"
    before = (
        "import sys, numpy, runtime.protocol.errors, runtime.protocol.sampling; before = set(sys.modules); "
    )
    assert subprocess.run([sys.executable, "-c", before + code], timeout=300, check=False).returncode == 0
