"""Text as token arrays: found, tokenized once into a memory-mapped cache, packed into rows, read by step.

A split is one flat array of tokens and the ends of its documents. A row is a range of that array, so packing is arithmetic:

    stream      the text is cut every `context` tokens, whatever documents it runs through; documents end in the tokenizer's
                separator where it has one. The last row reaches back over tokens that the row before counts.
    documents   whole documents, as many as fit, side by side; none sees another, and what is left of a row is padding.

Every token of a split counts in exactly one row. Where the files are:

    text8       http://mattmahoney.net/dc/text8.zip (unzip it and give the file)
    LM1B        http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz: unpack it and give
                the folder (the set's loading script is gone from the Hugging Face hub)
    OpenWebText Skylion007/openwebtext on the hub, or its Parquet files in a folder
"""

import functools
import hashlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from config import SettingError, TextConfig, require
from data import step_indices
from files import check_cache, publish
from hardware import to_device

SYMBOLS = " abcdefghijklmnopqrstuvwxyz"  # text8's 27
WORDS = 1000  # that the tokenizer `words` knows
TRAIN_SHARE, VALIDATION_SHARE = 0.9, 0.05  # of a text that comes in one piece, as text8 is cut; the rest is held out
NAMES = ("topics", "text8", "files", "hub")
FORMAT = 2  # part of the cache's key
NETWORK_TIMEOUT = 10  # seconds
PADDING = -1  # the document of a row's padding


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


class Tokenizer(Protocol):
    """Text to tokens and back. `fingerprint` tells apart tokenizers that give other tokens."""

    name: str
    size: int
    separator: int | None  # the token that ends a document
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, (T,)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Symbols:
    """text8's 27 characters: a to z and the space."""

    name, size, separator, fingerprint = "symbols", len(SYMBOLS), None, "symbols"

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text.

        Raises:
            SettingError: a character that is not one of the 27.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        unknown = codes[(codes != 32) & ((codes < 97) | (codes > 122))]
        if len(unknown):
            raise SettingError(
                f"data.tokenizer={self.name} knows a to z and the space, not {chr(unknown[0])!r}: use data.tokenizer=bytes, with "
                "data.name=files where it is text8"
            )
        return np.where(codes == 32, 0, codes - 96).astype(np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(SYMBOLS[token] for token in tokens)


class Words(Symbols):
    """The commonest words of the topics, each with the space after it, and text8's 27 characters for all others.

    A piece of text is about a quarter as long as in characters, and what a model of minutes writes consists of words.
    """

    name = "words"

    def __init__(self) -> None:
        whole = to_symbols(topics_text())
        counts = Counter(whole[: int(len(whole) * TRAIN_SHARE)].split())
        words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
        self._pieces = [*SYMBOLS, *(f"{word} " for word in words)]
        self._tokens = {piece: token for token, piece in enumerate(self._pieces)}
        self.size = len(self._pieces)
        self.fingerprint = hashlib.sha256(json.dumps(self._pieces).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        super().encode(text)  # refuses what it does not know
        found: list[int] = []
        for piece in re.findall("[a-z]+ ?| ", text):
            token = self._tokens.get(piece)
            found.extend([token] if token is not None else (self._tokens[character] for character in piece))
        return np.array(found, dtype=np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in tokens)


class Bytes:
    """The 256 bytes of UTF-8."""

    name, size, separator, fingerprint = "bytes", 256, None, "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Subwords:
    """A tokenizer of `tokenizers` or `transformers`; the beginning- and end-of-text tokens that it would add are left out.

    Args:
        name: a JSON file of `tokenizers`, a folder, or the name of a model on the Hugging Face hub.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            if name.endswith(".json"):
                from tokenizers import Tokenizer as Inner

                require(Path(name).is_file(), f"data.tokenizer={name}: there is no such file")
                self._inner = Inner.from_file(name)
                known = (self._inner.token_to_id(token) for token in ("</s>", "<|endoftext|>"))
                self.separator = next((token for token in known if token is not None), None)
            else:
                from transformers import AutoTokenizer

                check_hub("data.tokenizer", name)
                loaded = AutoTokenizer.from_pretrained(name)
                self._inner, self.separator = loaded.backend_tokenizer, loaded.eos_token_id
        except ImportError as error:
            raise SettingError(f"data.tokenizer={name} needs {error.name}: pip install '.[text]'") from None
        except SettingError:
            raise
        except Exception as error:  # the libraries' errors share no base class
            raise SettingError(f"data.tokenizer={name} cannot be read as a tokenizer ({reason(error)})") from None
        self._inner.no_truncation()  # both are for batches of sentences, not for a whole text
        self._inner.no_padding()
        self.size = max(self._inner.get_vocab().values(), default=-1) + 1  # numbers may have gaps
        require(self.size >= 2, f"data.tokenizer={name} knows {self.size} tokens: there is nothing to learn from fewer than 2")
        self.fingerprint = hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens))


def reason(error: Exception) -> str:
    """Returns the kind of an error of another library and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def check_hub(setting: str, name: str, repo_type: str = "model") -> None:
    """Makes sure that a model or set can be had: from a local folder, the hub's cache, or the network.

    Raises:
        SettingError: it cannot; found at once, where the libraries themselves try for most of a minute.
    """
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE, is_offline_mode

    if Path(name).is_dir():
        return
    if Path(HF_HUB_CACHE).is_dir() and any(found.repo_id == name for found in scan_cache_dir().repos):
        return
    require(
        not is_offline_mode(), f"{setting}={name} is not on this machine and HF_HUB_OFFLINE=1 forbids to fetch it: give a path"
    )
    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=NETWORK_TIMEOUT)
    except Exception as error:  # the client's network errors share no public base class
        raise SettingError(
            f"{setting}={name} is neither a local folder nor to be had from the Hugging Face hub ({type(error).__name__}): "
            "give the path of a local copy"
        ) from None


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that a name stands for.

    Raises:
        SettingError: there is none, or a library or the network is missing.
    """
    if name == "symbols":
        return Symbols()
    if name == "words":
        return Words()
    if name == "bytes":
        return Bytes()
    return Subwords(name)


# ---------------------------------------------------------------------------------------------------------------------
# What the rest of the code sees


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """One split: flat tokens, the ends of its documents, and how many characters they stand for."""

    tokens: np.ndarray  # (T,), a memory map
    ends: np.ndarray  # (documents,) int64
    characters: int


@dataclass(frozen=True, eq=False)
class Rows:
    """A split cut into rows: row r is tokens[start : stop], and its last `counted` tokens count."""

    split: TokenSplit
    context: int
    packing: str
    start: np.ndarray  # (R,) int64
    stop: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows.

        Returns:
            tokens: (n, context) int64, 0 where there is padding.
            documents: (n, context) int64: the number of each token's document, PADDING for padding; 0 for a stream.
            counts: (n, context) bool: the tokens that count.
        """
        index = self.start[rows][:, None] + np.arange(self.context)  # (n, T)
        stop = self.stop[rows][:, None]
        there = index < stop
        tokens = np.where(there, self.split.tokens[np.minimum(index, len(self.split.tokens) - 1)], 0)
        documents = np.zeros_like(index)
        if self.packing == "documents":
            documents = np.where(there, np.searchsorted(self.split.ends, index, side="right"), PADDING)
        counts = there & (index >= stop - self.counted[rows][:, None])
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(documents), torch.from_numpy(counts)


@dataclass(frozen=True, eq=False)
class TextData:
    """A tokenized text. `fingerprint` identifies tokens, documents and tokenizer."""

    name: str
    tokenizer: Tokenizer
    train: Rows
    test: Rows
    fingerprint: str
    scale: float = 1.0  # tokens have no units


class TokenSource:
    """Training batches by block and step, in an order of their own for every block."""

    def __init__(self, data: TextData, device: torch.device | str, *, seed: int) -> None:
        self.rows, self.device, self.seed = data.train, torch.device(device), seed

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the `rows` part of a step's batch, on the device.

        Returns:
            tokens, documents: (n, T) int64, see Rows.take.
            weights: (n, T) float32: 0 for tokens that do not count; summed over the whole batch and divided by its size, losses
            times weights are the mean over the tokens of the batch that count.
        """
        index = step_indices(self.seed, block, step, batch_size, len(self.rows))
        tokens, documents, counts = self.rows.take(index[rows])
        weights = counts.float() * (batch_size / int(self.rows.counted[index].sum()))
        return to_device(tokens, self.device), to_device(documents, self.device), to_device(weights, self.device)

    def prefetch(self, block: int, step: int, batch_size: int) -> None:
        """Nothing to do: rows are read faster than a step is made."""


def cut_rows(split: TokenSplit, context: int, packing: str, name: str) -> Rows:
    """Cuts a split into rows.

    Args:
        packing: `stream` or `documents`.
        name: of the split, for messages.

    Raises:
        SettingError: no text, less than a row of it, or a document longer than a row.
    """
    total = len(split.tokens)
    require(total > 0, f"data: the {name} text is empty")
    if packing == "stream":
        require(total >= context, f"data.context={context}: the {name} text has {total} tokens, less than one row")
        start = np.arange(0, total - context + 1, context)
        counted = np.full(len(start), context)
        if rest := total % context:
            start, counted = np.append(start, total - context), np.append(counted, rest)
        return Rows(split, context, packing, start, start + context, counted)
    begin = np.concatenate([[0], split.ends[:-1]])
    lengths = split.ends - begin
    longer = int((lengths > context).sum())
    require(
        longer == 0,
        f"data.context={context}: {longer} documents of the {name} text are longer, up to {lengths.max()} tokens: raise it, or "
        "set data.packing=stream, which cuts them",
    )
    starts = [0]
    for first, last in zip(begin.tolist(), split.ends.tolist(), strict=True):
        if last - starts[-1] > context:
            starts.append(first)
    start, stop = np.array(starts), np.array([*starts[1:], total])
    return Rows(split, context, packing, start, stop, stop - start)


# ---------------------------------------------------------------------------------------------------------------------
# Finding and tokenizing


def check_text(settings: TextConfig) -> Tokenizer:
    """Finds text and tokenizer, and refuses what cannot work, without reading the text.

    Raises:
        SettingError: an unknown name, a missing file, library or network, a setting that this text does not take.
    """
    require(settings.name in NAMES, f"data.name={settings.name} is not one of {', '.join(NAMES)}")
    require(settings.packing in ("stream", "documents"), f"data.packing={settings.packing} is not one of stream, documents")
    require(settings.context >= 2, f"data.context={settings.context} must be at least 2")
    check_cache(settings.cache)
    whole = settings.name in ("topics", "text8") or (settings.path is not None and Path(settings.path).is_file())
    require(
        not whole or (settings.train_split is None and settings.test_split is None),
        f"data.train_split and data.test_split have no meaning for {settings.name}, which is cut 90/5/5: leave them out",
    )
    require(settings.name != "topics" or settings.path is None, "data.path has no meaning for topics, which comes with Python")
    require(
        settings.name == "topics" or settings.path is not None,
        f"data.path is needed for data.name={settings.name}: text_data.py says where the files are",
    )
    if settings.name == "hub":
        check_hub("data.path", settings.path, "dataset")
    elif settings.path is not None:
        require(Path(settings.path).exists(), f"data.path={settings.path} does not exist")
        if Path(settings.path).is_dir():
            split_files(settings, "train"), split_files(settings, "test")
    require(settings.name != "text8" or settings.tokenizer == "symbols", "data.tokenizer must be symbols for text8")
    return load_tokenizer(settings.tokenizer)


def load_text(settings: TextConfig) -> TextData:
    """Returns a text, tokenized at the first call and memory-mapped from then on.

    Raises:
        SettingError: as check_text, and what reading finds: no text, characters that the tokenizer does not know, a document
            longer than the context.
    """
    tokenizer = check_text(settings)
    entry = Path(settings.cache).expanduser() / f"text_{cache_key(settings, tokenizer)}"
    found = open_tokenized(entry)
    if found is None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=entry.parent))
        try:
            tokenize(settings, tokenizer, scratch)
            publish(scratch, entry, lambda: open_tokenized(entry) is not None)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        found = open_tokenized(entry)
    splits, fingerprint = found
    rows = [cut_rows(split, settings.context, settings.packing, name) for name, split in splits.items()]
    return TextData(settings.name, tokenizer, *rows, f"{tokenizer.fingerprint[:16]}/{fingerprint}")


def open_tokenized(entry: Path) -> tuple[dict[str, TokenSplit], str] | None:
    """Returns the splits and the fingerprint that a folder of the cache holds; None where it is not there or damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_text())
        splits = {
            name: TokenSplit(
                np.load(entry / f"{name}.npy", mmap_mode="r"), np.load(entry / f"{name}_ends.npy"), meta["characters"][name]
            )
            for name in ("train", "test")
        }
        whole = all(split.ends[-1] == len(split.tokens) for split in splits.values())
        return (splits, meta["fingerprint"]) if whole else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return None


def cache_key(settings: TextConfig, tokenizer: Tokenizer) -> str:
    """Returns what names a tokenized text in the cache: where it is from, sizes and times of its files, and the tokenizer."""
    files = []
    if settings.name == "topics":
        files = [hashlib.sha256(topics_text().encode()).hexdigest()]
    elif settings.name != "hub":
        paths = [Path(settings.path)]
        if paths[0].is_dir():
            paths = [*split_files(settings, "train"), *split_files(settings, "test")]
        files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    which = [settings.name, settings.path, settings.text_column, settings.train_split, settings.test_split, settings.packing]
    return hashlib.sha256(json.dumps([FORMAT, which, files, tokenizer.fingerprint]).encode()).hexdigest()[:20]


def tokenize(settings: TextConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokens and ends of documents of both splits, and meta.json."""
    dtype = np.uint8 if tokenizer.size <= 2**8 else np.uint16 if tokenizer.size <= 2**16 else np.uint32
    digest, characters = hashlib.sha256(tokenizer.fingerprint.encode()), {}
    for split in ("train", "test"):
        ends, total, characters[split] = [], 0, 0
        with open(folder / "flat", "wb") as file:
            for document in documents(settings, tokenizer, split):
                tokens = tokenizer.encode(document)
                if tokenizer.separator is not None:
                    tokens = np.append(tokens, tokenizer.separator)
                file.write(tokens.astype(dtype).tobytes())
                total += len(tokens)
                ends.append(total)
                characters[split] += len(document) + (tokenizer.separator is not None)
        require(total > 0, f"data: the {split} text is empty")
        flat = np.memmap(folder / "flat", dtype, "r")
        np.save(folder / f"{split}.npy", flat)
        np.save(folder / f"{split}_ends.npy", np.array(ends, dtype=np.int64))
        digest.update(flat)
        digest.update(np.array(ends, dtype=np.int64))
        (folder / "flat").unlink()
    (folder / "meta.json").write_text(json.dumps({"fingerprint": digest.hexdigest(), "characters": characters}))


def topics_text() -> str:
    """Returns the text of the standard library's `pydoc_data.topics`; it differs by Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def to_symbols(text: str) -> str:
    """Returns a text in text8's manner: lower case, everything but a to z a space, no two spaces in a row."""
    return " ".join("".join(character if character in SYMBOLS else " " for character in text.lower()).split())


def documents(settings: TextConfig, tokenizer: Tokenizer, split: str) -> Iterator[str]:
    """Yields the documents of `train` or `test`; a text in one piece is one document, or one per line where they are packed."""
    if settings.name == "hub":
        yield from hub_documents(settings, split)
        return
    path = None if settings.path is None else Path(settings.path)
    if path is not None and path.is_dir():
        for file in split_files(settings, split):
            yield from file_documents(file, settings)
        return
    pieces = [topics_text()] if path is None else list(file_documents(path, settings))
    if path is None and isinstance(tokenizer, Symbols):
        pieces = [to_symbols(pieces[0])]
    if len(pieces) == 1:
        text = pieces[0]
        first, second = int(len(text) * TRAIN_SHARE), int(len(text) * (TRAIN_SHARE + VALIDATION_SHARE))
        yield text[:first] if split == "train" else text[second:]
    else:
        yield from cut_documents(pieces, split)


def cut_documents(pieces: Sequence[str], split: str) -> Sequence[str]:
    """Returns the first 90% or the last 5% of documents."""
    first, second = int(len(pieces) * TRAIN_SHARE), int(len(pieces) * (TRAIN_SHARE + VALIDATION_SHARE))
    return pieces[:first] if split == "train" else pieces[second:]


def split_files(settings: TextConfig, split: str) -> list[Path]:
    """Returns a split's files in a folder, by the pattern that its setting gives, `train*` or `test*` by default."""
    pattern = (settings.train_split if split == "train" else settings.test_split) or f"{split}*"
    files = sorted(path for path in Path(settings.path).glob(pattern) if path.is_file())
    require(len(files) > 0, f"data.{split}_split: no file in data.path={settings.path} matches {pattern}")
    return files


def file_documents(path: Path, settings: TextConfig) -> Iterator[str]:
    """Yields a file's documents: rows of a Parquet or Arrow file, lines of a text where documents are packed, or all of it."""
    if path.suffix in (".parquet", ".arrow"):
        from datasets import Dataset

        try:
            table = Dataset.from_parquet(str(path)) if path.suffix == ".parquet" else Dataset.from_file(str(path))
        except Exception as error:  # the library's errors share no base class
            raise SettingError(f"data.path: {path} cannot be read ({reason(error)})") from None
        yield from text_of(table, settings, str(path))
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingError(f"data.path: {path} is not text in UTF-8, nor Parquet or Arrow by its name") from None
    if settings.packing == "documents":
        yield from (line for line in text.split("\n") if line)
    elif text:
        yield text


def text_of(table: Any, settings: TextConfig, where: str) -> Iterator[str]:
    """Yields the text of a data set's column, row by row, without those that have none."""
    features, column = table.features, settings.text_column
    require(column in features, f"data.text_column={column} is not in {where}, which has {', '.join(features)}")
    kind = getattr(features[column], "dtype", None)
    require(
        kind in ("string", "large_string", "null"), f"data.text_column={column} of {where} holds no text, but {kind or 'more'}"
    )
    yield from (text for text in table[column] if text)


def hub_documents(settings: TextConfig, split: str) -> Iterator[str]:
    """Yields the documents of a set on the hub, or of a folder in its layout; without a test split, of its last 5%."""
    from datasets import load_dataset

    own = settings.train_split or "train" if split == "train" or settings.test_split is None else settings.test_split
    try:
        table = load_dataset(settings.path, split=own)
    except Exception as error:  # the library's errors share no base class
        raise SettingError(f"data.path={settings.path} cannot be read ({reason(error)})") from None
    first, second = int(len(table) * TRAIN_SHARE), int(len(table) * (TRAIN_SHARE + VALIDATION_SHARE))
    if settings.test_split is None:
        table = table.select(range(first) if split == "train" else range(second, len(table)))
    yield from text_of(table, settings, f"data.path={settings.path}")
