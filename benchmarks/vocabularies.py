"""Vocabularies of real sizes, trained here on text found on the machine. Knows no grammar and no model.

A byte-level BPE is trained once with the `tokenizers` library on Python sources, documentation and manual
pages, 131,072 entries large; a smaller vocabulary is the beginning of its merges, as if training had stopped
earlier. What was trained is kept in a folder outside of the repository: SGLANG_DSL_VOCABULARIES, by default
one below the system's temporary folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.grammar.masks.vocabulary_bytes import vocabulary_from_file
from runtime.protocol.vocabulary import Vocabulary

LARGEST = 131_072
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""The last ids of each vocabulary; the first of them ends a generation."""

PER_FILE, IN_ALL = 64 << 10, 48 << 20
SUFFIXES = (".py", ".md", ".rst", ".txt", ".json", ".html", ".pyi", ".gz")
WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What a merge does not cross: words with the space before them, up to three digits, runs of signs."""


def default_folder() -> Path:
    named = os.environ.get("SGLANG_DSL_VOCABULARIES")
    return Path(named) if named else Path(tempfile.gettempdir()) / "sglang-dsl-vocabularies"


def texts(limit: int = IN_ALL, folders: Sequence[Path] = ()) -> Iterator[str]:
    """Pieces of text files of this machine, or of `folders`, in an order that their paths decide."""
    paths = sysconfig.get_paths()
    usual = (Path(paths["stdlib"]), Path(paths["purelib"]), Path("/usr/share/doc"), Path("/usr/share/man"))
    found = {
        path for folder in folders or usual for path in folder.rglob("*") if path.name.endswith(SUFFIXES)
    }
    files = sorted(found)
    random.Random(0).shuffle(files)
    taken = 0
    for path in files:
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = data[:PER_FILE].decode("utf-8", "ignore")
        except (OSError, EOFError):
            continue
        if len(text) < 200 or "\0" in text:
            continue
        yield text
        taken += len(text)
        if taken > limit:
            return


def train(folders: Sequence[Path] = ()) -> Tokenizer:
    """A byte-level BPE of at most LARGEST entries; half a minute of CPU time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
    )
    tokenizer.train_from_iterator(texts(folders=folders), trainer)
    return tokenizer


def cut(trained: Tokenizer, size: int) -> Tokenizer:
    """The same tokenizer with `size` entries: 256 bytes, the first merges, then SPECIAL."""
    data = json.loads(trained.to_str())
    model = data["model"]
    known = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in model["merges"]:
        if len(known) == size - len(SPECIAL):
            break
        merges.append([left, right])
        known.setdefault(left + right, len(known))
    model.update(vocab=known, merges=merges)
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_vocabulary(
    size: int, folder: Path | None = None, text: Sequence[Path] = ()
) -> tuple[Path, Vocabulary]:
    """The `tokenizer.json` with `size` entries, at most LARGEST, and its Vocabulary; trained if not there.

    `folder`: where it is kept; default_folder() by default. `text`: folders of text to train on.
    """
    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bpe-{size}.json"
    if not path.exists():
        largest = folder / "bpe-trained.json"
        if not largest.exists():
            _keep(train(text), largest)
        _keep(cut(Tokenizer.from_file(str(largest)), size), path)
    width = Tokenizer.from_file(str(path)).get_vocab_size()
    return path, vocabulary_from_file(path, vocab_size=width, eos=[width - len(SPECIAL)])


def _keep(tokenizer: Tokenizer, path: Path) -> None:
    """Written whole or not at all: others may be looking for it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        part.write(tokenizer.to_str().encode())
    os.replace(part.name, path)


def about(vocabulary: Vocabulary) -> str:
    lengths = [len(token) for token in vocabulary.tokens if token]
    return f"{len(vocabulary):,} tokens, {statistics.mean(lengths):.1f} bytes a token, longest {max(lengths)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[32_768, LARGEST])
    parser.add_argument("--folder", type=Path, default=default_folder())
    given = parser.parse_args()
    for size in given.sizes:
        path, vocabulary = make_vocabulary(size, given.folder)
        print(f"{path}: {about(vocabulary)}")


if __name__ == "__main__":
    main()
