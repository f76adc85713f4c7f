"""Image sets: finding them, reading every layout, and the cache of decoded arrays that `data` maps into memory.

locate   says which layout the data have and refuses what cannot work, without decoding an image
READERS  one per layout, from files to raw or encoded images
cached   decodes once into a folder that is named by the source's identity, and opens it from then on
"""

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from config import SettingError
from files import check_cache, publish

# name: (channels, size in pixels, classes) of the sets whose shape is known beforehand
FIXED = {"digits": (1, 8, 10), "fashion_mnist": (1, 28, 10), "cifar10": (3, 32, 10), "cifar100": (3, 32, 100)}
NAMES = (*FIXED, "image_folder", "hub")
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "fine_label")
NO_LABELS = "none"  # as label_column: the set has no labels
TEST_SPELLINGS = ("test", "val", "validation", "valid")  # what test_split=test may be called
FASHION_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FASHION_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts them
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR_PICKLE = {"cifar10": (BATCHES, ["test_batch"]), "cifar100": (["train"], ["test"])}  # files of train, of test
CIFAR_BINARY = {name: tuple([f"{file}.bin" for file in files] for files in splits) for name, splits in CIFAR_PICKLE.items()}
GRAY_MODES = {"1", "L", "LA"}
COLOUR_MODES = {"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr"}
CACHE_FORMAT = 1  # part of the cache's key: raise it when the same source would decode to other arrays
CHUNK = 1024  # images that are decoded, hashed or counted at once


@dataclass(frozen=True, eq=False)
class Split:
    """One split: images uint8 (N, C, H, W), a memory map or LazyImages, and labels int64 (N,), zeros where there are none."""

    images: "np.ndarray | LazyImages"
    labels: np.ndarray


# -------------------------------------------------------------------------------------------------------------- finding the data


@dataclass(frozen=True)
class _Source:
    """Data that were found: what a reader needs, and what names them in the cache."""

    name: str
    layout: str  # key of READERS
    location: str  # folder, name of a Hugging Face set, or library and version
    size: int
    image_column: str | None
    label_column: str | None
    train_split: str
    test_split: str


def check_values(name: str, size: int, flip: bool, scale: float | None, sigma_data: float, cache: str) -> None:
    """Refuses values that are wrong whatever the data are."""
    if name not in NAMES:
        raise SettingError(f"data.name={name} is unknown; use one of {', '.join(NAMES)} (hub takes any Hugging Face image set)")
    if size < 1:
        raise SettingError(f"data.size={size} must be at least 1")
    if name in FIXED and size != FIXED[name][1]:
        raise SettingError(f"data.size={size} does not fit {name}, whose images are {FIXED[name][1]} pixels wide: set that size")
    if name == "digits" and flip:
        raise SettingError("data.flip must be false for digits: a mirrored digit is not a digit")
    for key, value in (("data.scale", scale), ("objective.sigma_data", sigma_data)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SettingError(f"{key}={value} must be a positive number")
    check_cache(cache)


def locate(
    name: str,
    path: str | None,
    size: int,
    image_column: str | None,
    label_column: str | None,
    train_split: str,
    test_split: str,
    cache: Path,
) -> _Source:
    """Returns where the data are and in which layout; raises SettingError where they are not."""
    layout, location = _layout(name, path, cache)
    source = _Source(name, layout, location, size, image_column, label_column, train_split, test_split)
    if layout not in ("table", "arrow"):
        for key, value in (("image_column", image_column), ("label_column", label_column)):
            if value is not None:
                raise SettingError(f"data.{key}={value} means nothing for {name} in the layout {layout}: leave it null")
    if layout in ("digits", "idx", "cifar_binary", "cifar_pickle") and (train_split, test_split) != ("train", "test"):
        raise SettingError(f"data.train_split and data.test_split must be train and test for {name} in the layout {layout}")
    if layout == "image_folder":
        folders = [entry.name for entry in os.scandir(location) if entry.is_dir()]
        _find_splits(source, folders)
    if layout in ("table", "arrow") and _open(_entry(source, cache)) is None:  # what was decoded before needs no network
        _check_table(source)
    return source


def _layout(name: str, path: str | None, cache: Path) -> tuple[str, str]:
    """Returns the layout that the data are in and their location."""
    if name == "digits":
        if path is not None:
            raise SettingError(f"data.path={path} means nothing for digits, which ship with scikit-learn: leave it null")
        import sklearn  # here, because it takes a second that other sets need not wait

        return "digits", f"scikit-learn {sklearn.__version__}"
    if path is None:
        if name == "fashion_mnist":
            return "idx", str(_fashion_folder(cache))
        if name in HUB_NAMES:
            return "table", HUB_NAMES[name]
        raise SettingError(f"data.path is needed for data.name={name}: a local folder, or for hub a Hugging Face set's name")
    folder = Path(path).expanduser().absolute()
    if name == "hub" and not folder.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
        return "table", path
    if not folder.is_dir():
        raise SettingError(f"data.path={path} is not a folder: give the folder that holds the data")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise SettingError(f"data.path={path} cannot be read: change its permissions or give another folder")
    if name == "image_folder":
        return "image_folder", str(folder)
    if name == "fashion_mnist":
        for first in (FASHION_FILES[0], FASHION_FILES[0] + ".gz"):
            if (found := _find_file(folder, first)) is not None:
                return "idx", str(_complete(found.parent))
        raise SettingError(f"data.path={path} holds no {FASHION_FILES[0]} (or .gz): give the folder of Fashion-MNIST's files")
    if _find_file(folder, "dataset_dict.json") is not None:
        return "arrow", str(_find_file(folder, "dataset_dict.json").parent)
    if name == "hub":
        return "table", str(folder)
    for layout, files in (("cifar_binary", CIFAR_BINARY[name]), ("cifar_pickle", CIFAR_PICKLE[name])):
        if (found := _find_file(folder, files[1][0])) is not None:
            missing = [file for file in files[0] if not (found.parent / file).is_file()]
            if missing:
                raise SettingError(f"data.path={path} holds {files[1][0]} but not {', '.join(missing)}: complete it")
            return layout, str(found.parent)
    if any(folder.rglob("*.parquet")):
        return "table", str(folder)
    raise SettingError(
        f"data.path={path} holds {name} in no known layout: Parquet, a save_to_disk folder, {CIFAR_BINARY[name][1][0]} or the "
        f"Python archive's {CIFAR_PICKLE[name][1][0]}"
    )


def _find_file(folder: Path, name: str) -> Path | None:
    """Returns the file of that name in `folder` or below it, where unpacked archives have it; the shallowest if several."""
    if (folder / name).is_file():
        return folder / name
    found = [path for path in folder.rglob(name) if path.is_file()]
    return min(found, key=lambda path: (len(path.parts), path), default=None)


def _complete(folder: Path) -> Path:
    """Returns the folder if all four of Fashion-MNIST's files are in it."""
    missing = [name for name in FASHION_FILES if not any((folder / (name + end)).is_file() for end in ("", ".gz"))]
    if missing:
        raise SettingError(f"data.path: {folder} lacks Fashion-MNIST's {', '.join(missing)}: complete it")
    return folder


def _fashion_folder(cache: Path) -> Path:
    """Returns Debian's folder or the downloaded one, and downloads where there is neither."""
    downloaded = cache / "fashion_mnist_files"
    for folder in (FASHION_DEBIAN, downloaded):
        if folder.is_dir():
            return _complete(folder)
    from torchvision.datasets import FashionMNIST

    scratch = cache / f"{downloaded.name}.{uuid.uuid4().hex}.part"
    try:
        raw = Path(FashionMNIST(str(scratch), download=True).raw_folder)
        publish(raw, downloaded, lambda: downloaded.is_dir())
    except (RuntimeError, OSError) as error:
        raise SettingError(
            "data.name=fashion_mnist could not be downloaded: without network run `apt-get install dataset-fashion-mnist`, or "
            "set data.path to a folder with its four idx files"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _complete(downloaded)


def _check_table(source: _Source) -> None:
    """Checks splits and columns as far as they are known without reading the rows."""
    import datasets
    import pyarrow.parquet

    local = Path(source.location).is_dir()
    if not local:
        _check_hub(source)
    with tempfile.TemporaryDirectory() as scratch, _one_sentence(source):
        if source.layout == "arrow":
            by_split = datasets.load_from_disk(source.location).column_names
            splits, columns = list(by_split), next(iter(by_split.values()), [])
        else:
            builder = datasets.load_dataset_builder(source.location, cache_dir=scratch if local else None)
            files = {str(split): names for split, names in (builder.config.data_files or {}).items()}
            splits, columns = list(files), list(builder.info.features or ())
            first = next((name for names in files.values() for name in names), "")
            if local and not columns and first.endswith(".parquet"):
                columns = pyarrow.parquet.read_schema(first).names
    if splits:
        _find_splits(source, splits)
    if columns:
        _find_columns(source, columns)


def _check_hub(source: _Source) -> None:
    """Asks the Hub once, with a short limit: `datasets` itself tries for 23 seconds before it says that there is no network."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import RepositoryNotFoundError

    if is_offline_mode():  # then `datasets` looks into its own cache only, at once
        return
    try:
        HfApi().dataset_info(source.location, timeout=5)
    except RepositoryNotFoundError as error:
        raise SettingError(
            f"data.path={source.location} is neither a folder nor a Hugging Face set that can be seen: correct it, or log in "
            "with `hf auth login` if it is private"
        ) from error
    except Exception as error:  # the client's network errors share no public base class
        raise SettingError(
            f"data.name={source.name}: {source.location} is not a folder here, and Hugging Face, which may have a set of that "
            f"name, cannot be reached ({type(error).__name__}): set data.path to a local folder, or HF_HUB_OFFLINE=1 if the set "
            "is in Hugging Face's own cache"
        ) from error


@contextlib.contextmanager
def _one_sentence(source: _Source) -> Iterator[None]:
    """Turns what `datasets` raises for missing, gated or unreadable sets into one sentence."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise SettingError(
            f"data.path={source.location} cannot be read as a set of images ({reason}): give a local folder, or the name of a "
            "set that you have access to"
        ) from error


def _find_splits(source: _Source, splits: list[str]) -> tuple[str, str]:
    """Returns the names of the training and of the held-out split among `splits`."""
    train = source.train_split
    spellings = TEST_SPELLINGS if source.test_split == "test" else (source.test_split,)
    test = next((name for name in spellings if name in splits), None)
    for key, wanted, found in (("train_split", train, train in splits), ("test_split", source.test_split, test is not None)):
        if not found:
            raise SettingError(f"data.{key}={wanted} is not in {source.location}: it has {', '.join(sorted(splits)) or 'none'}")
    return train, test


def _find_columns(source: _Source, columns: list[str]) -> tuple[str, str]:
    """Returns the names of the image and of the label column among `columns`; NO_LABELS stays what it is."""
    chosen = []
    for key, wanted, spellings in (
        ("image_column", source.image_column, IMAGE_COLUMNS),
        ("label_column", source.label_column, LABEL_COLUMNS),
    ):
        if key == "label_column" and wanted == NO_LABELS and source.name == "hub":
            chosen.append(NO_LABELS)
            continue
        found = [name for name in (spellings if wanted is None else (wanted,)) if name in columns]
        if len(found) != 1:
            which = "not found" if not found else "not clear"
            raise SettingError(
                f"data.{key}={wanted or 'null'} is {which} in {source.location}: set it to one of {', '.join(columns)}"
            )
        chosen.append(found[0])
    return chosen[0], chosen[1]


# -------------------------------------------------------------------------------------------------------------- reading the data


@dataclass(frozen=True)
class _Encoded:
    """Images that are still files: `open(i)` returns image i as a Pillow image, of which only the header is read."""

    count: int
    open: Callable[[int], Image.Image]


@dataclass(frozen=True)
class _Raw:
    """A set as it was found: per split images, uint8 (N, C, H, W) or _Encoded, and integer labels (N,)."""

    splits: dict[str, tuple[np.ndarray | _Encoded, np.ndarray]]
    num_classes: int


def _read_digits(source: _Source, scratch: Path) -> _Raw:
    """scikit-learn's 1,797 digits, 0..16 spread over 0..255, cut once and for all into 80% and 20% of each class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)[:, None]  # (N, 1, 8, 8)
    cut = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    train_images, test_images, train_labels, test_labels = cut
    return _Raw({"train": (train_images, train_labels), "test": (test_images, test_labels)}, 10)


def _read_idx(source: _Source, scratch: Path) -> _Raw:
    """Fashion-MNIST's four files, gzipped or not."""
    images, labels, test_images, test_labels = (_idx_array(Path(source.location), name) for name in FASHION_FILES)
    return _Raw({"train": (images[:, None], labels), "test": (test_images[:, None], test_labels)}, FIXED[source.name][2])


def _idx_array(folder: Path, name: str) -> np.ndarray:
    """Reads one IDX file of bytes: two zeros, 8 (the type), the number of axes, their lengths as big-endian int32, the data."""
    plain = folder / name
    try:
        content = plain.read_bytes() if plain.is_file() else gzip.decompress((folder / (name + ".gz")).read_bytes())
        axes = content[3]
        shape = np.frombuffer(content, ">i4", count=axes, offset=4).tolist()
        if content[:3] != b"\0\0\x08" or axes != (3 if "images" in name else 1):
            raise ValueError("its header is not one of bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SettingError(f"data.path: {plain} is not a whole IDX file ({error}): fetch it again") from error


def _read_cifar_binary(source: _Source, scratch: Path) -> _Raw:
    """CIFAR's binary layout: rows of 1 label byte (CIFAR-100: coarse, then fine) and 3,072 pixels, channel by channel."""
    label_bytes = 1 if source.name == "cifar10" else 2
    splits = {}
    for split, files in zip(("train", "test"), CIFAR_BINARY[source.name], strict=True):
        content = np.concatenate([np.fromfile(Path(source.location) / file, np.uint8) for file in files])
        if content.size % (label_bytes + 3072):
            raise SettingError(
                f"data.path: {', '.join(files)} in {source.location} has a size that is no whole number of images: fetch it again"
            )
        rows = content.reshape(-1, label_bytes + 3072)
        splits[split] = rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]
    return _Raw(splits, FIXED[source.name][2])


class _ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of numpy arrays, strings, numbers and containers; whatever else a pickle names is refused, not imported."""

    ALLOWED = {
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 spells bytes
            return lambda text, _: text.encode("latin1")
        module = module.replace("numpy.core.", "numpy._core.")  # CIFAR's archive was written by an old numpy
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays are read")
        return super().find_class(module, name)


def _read_cifar_pickle(source: _Source, scratch: Path) -> _Raw:
    """CIFAR's Python archive, without running anything that is in it."""
    label_key = "labels" if source.name == "cifar10" else "fine_labels"
    splits = {}
    for split, files in zip(("train", "test"), CIFAR_PICKLE[source.name], strict=True):
        images, labels = [], []
        for path in (Path(source.location) / file for file in files):
            try:
                with path.open("rb") as file:
                    content = _ArrayUnpickler(file, encoding="latin1").load()
                content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
                images.append(np.asarray(content["data"], np.uint8).reshape(-1, 3, 32, 32))
                labels.append(np.asarray(content[label_key], np.int64))
            except Exception as error:  # a broken pickle can raise anything
                raise SettingError(
                    f"data.path: {path} is not a file of CIFAR's Python archive ({type(error).__name__}: {error}): use the "
                    "binary or the Parquet version"
                ) from error
        splits[split] = np.concatenate(images), np.concatenate(labels)
    return _Raw(splits, FIXED[source.name][2])


def _read_image_folder(source: _Source, scratch: Path) -> _Raw:
    """A folder per split, in it a folder per class; classes and files in the order of their names."""
    from torchvision.datasets import ImageFolder

    root = Path(source.location)
    names = _find_splits(source, [entry.name for entry in root.iterdir() if entry.is_dir()])
    found, classes = {}, None
    for split, name in zip(("train", "test"), names, strict=True):
        try:
            listing = ImageFolder(str(root / name))
        except FileNotFoundError as error:
            raise SettingError(f"data.path: {root / name} must hold a folder of images per class ({error})") from error
        if classes is not None and listing.classes != classes:
            raise SettingError(f"data.path: the classes of {root / name} are not those of the training split: make them agree")
        classes = listing.classes
        files = [file for file, _ in listing.samples]
        found[split] = _Encoded(len(files), lambda i, files=files: Image.open(files[i])), np.array(listing.targets)
    return _Raw(found, len(classes))


def _read_table(source: _Source, scratch: Path) -> _Raw:
    """A Parquet or Arrow folder or a Hugging Face set, through `datasets`."""
    import datasets

    local = Path(source.location).is_dir()
    with _one_sentence(source):
        if source.layout == "arrow":
            table = datasets.load_from_disk(source.location)
        else:  # of a local folder `datasets` makes an Arrow copy, which is of no further use
            table = datasets.load_dataset(source.location, cache_dir=str(scratch / "arrow") if local else None)
    names = _find_splits(source, list(table))
    image_column, label_column = _find_columns(source, table[names[0]].column_names)
    splits, num_classes = {}, 0
    for split, name in zip(("train", "test"), names, strict=True):
        try:
            images = table[name].select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:  # the last is pyarrow's
            raise SettingError(
                f"data.image_column={image_column} of {source.location} does not hold images: choose another"
            ) from error
        labels = np.zeros(len(images), np.int64)
        if label_column != NO_LABELS:
            labels = table[name].with_format("numpy")[label_column][:]
            feature = table[name].features[label_column]
            if not np.issubdtype(labels.dtype, np.integer):
                raise SettingError(
                    f"data.label_column={label_column} of {source.location} does not hold integers: choose another"
                )
            if isinstance(feature, datasets.ClassLabel):
                num_classes = feature.num_classes
            elif split == "train":
                num_classes = FIXED[source.name][2] if source.name in FIXED else int(labels.max(initial=-1)) + 1
        splits[split] = _Encoded(len(images), lambda i, rows=images: _open_image(rows[i][image_column])), labels
    if source.name in FIXED and num_classes != FIXED[source.name][2]:
        raise SettingError(f"data.label_column={label_column} has {num_classes} classes, not {source.name}'s: use data.name=hub")
    return _Raw(splits, num_classes)


def _open_image(cell: dict | None) -> Image.Image:
    """Opens one cell of an undecoded image column: the file's bytes, or where it lies."""
    if cell is None or cell == {"bytes": None, "path": None}:
        raise ValueError("there is none in this row")
    return Image.open(cell["path"] if cell["bytes"] is None else io.BytesIO(cell["bytes"]))


READERS = {
    "digits": _read_digits,
    "idx": _read_idx,
    "cifar_binary": _read_cifar_binary,
    "cifar_pickle": _read_cifar_pickle,
    "image_folder": _read_image_folder,
    "arrow": _read_table,
    "table": _read_table,
}


# --------------------------------------------------------------------------------------------------- decoding, and what is kept


def cached(source: _Source, cache: Path) -> tuple[tuple[Split, Split], dict]:
    """Returns both splits and what is known of them, from the cache or into it."""
    entry = _entry(source, cache)
    opened = _open(entry)
    if opened is not None:
        return opened
    scratch = entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.part")
    try:
        (scratch / "entry").mkdir(parents=True)
        _decode(source, scratch)
        publish(scratch / "entry", entry, lambda: _open(entry) is not None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    opened = _open(entry)
    if opened is None:
        raise SettingError(f"data.cache: {entry} was changed while it was read: run again, or name another folder")
    return opened


def _entry(source: _Source, cache: Path) -> Path:
    """Returns the cache folder that belongs to a source: its name changes with whatever identifies the data."""
    files = []
    if os.path.isdir(source.location):
        for folder, _, names in os.walk(source.location, followlinks=True):
            if Path(folder).is_relative_to(cache.absolute()):  # a cache inside the data must not change what it is named by
                continue
            for name in names:
                path = os.path.join(folder, name)
                try:
                    stat = os.stat(path)
                except OSError as error:
                    raise SettingError(f"data.path: {path} cannot be read ({error.strerror}): correct or remove it") from error
                files.append((os.path.relpath(path, source.location), stat.st_size, stat.st_mtime_ns))
    identity = json.dumps([CACHE_FORMAT, asdict(source), sorted(files)], sort_keys=True)
    return cache / f"{source.name}_{source.size}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _open(entry: Path) -> tuple[tuple[Split, Split], dict] | None:
    """Returns the splits of a cache entry, or None where it is missing or not what was written."""
    try:
        info = json.loads((entry / "info.json").read_text())
        if any((entry / name).stat().st_size != size for name, size in info["bytes"].items()):
            return None
        train, test = (
            Split(np.load(entry / f"{split}_images.npy", mmap_mode="r"), np.load(entry / f"{split}_labels.npy", mmap_mode="r"))
            for split in ("train", "test")
        )
    except (OSError, ValueError, KeyError):
        return None
    if [train.images.shape[0], test.images.shape[0]] != info["counts"]:
        return None
    return (train, test), info


def _decode(source: _Source, scratch: Path) -> None:
    """Writes a source's splits and info.json into scratch/entry."""
    raw = READERS[source.layout](source, scratch)
    for split, (images, labels) in raw.splits.items():
        _check_split(source, split, images, labels, raw.num_classes)
    channels = FIXED[source.name][0] if source.name in FIXED else _channels(source, raw)
    entry = scratch / "entry"
    digest = hashlib.sha256()
    for split, (images, labels) in raw.splits.items():
        labels = labels.astype("<i8")
        np.save(entry / f"{split}_labels.npy", labels)
        if isinstance(images, _Encoded):
            _decode_images(source, split, images, channels, entry / f"{split}_images.npy")
        else:
            np.save(entry / f"{split}_images.npy", np.ascontiguousarray(images))
        pixels = np.load(entry / f"{split}_images.npy", mmap_mode="r")
        digest.update(f"{split} {pixels.shape}".encode())
        counts = np.zeros(256, np.int64)  # of pixel values
        for start in range(0, len(pixels), CHUNK):
            chunk = pixels[start : start + CHUNK]
            digest.update(chunk.tobytes())
            counts += np.bincount(chunk.ravel(), minlength=256)
        digest.update(labels.tobytes())
        if split == "train":
            std = _std(counts)
    info = {
        "counts": [len(labels) for _, labels in raw.splits.values()],
        "num_classes": raw.num_classes,
        "std": std,  # of the train split's pixels / 127.5 - 1
        "fingerprint": digest.hexdigest(),
        "source": asdict(source),
        "bytes": {path.name: path.stat().st_size for path in sorted(entry.iterdir())},
    }
    (entry / "info.json").write_text(json.dumps(info, indent=1))


def _check_split(source: _Source, split: str, images: np.ndarray | _Encoded, labels: np.ndarray, num_classes: int) -> None:
    """Refuses empty splits, arrays of the wrong shape and labels out of range."""
    count = images.count if isinstance(images, _Encoded) else len(images)
    if count == 0 or count != len(labels):
        raise SettingError(
            f"data.path: the {split} split of {source.location} has {count} images and {len(labels)} labels: complete it"
        )
    if not isinstance(images, _Encoded) and images.shape[1:] != (FIXED[source.name][0], source.size, source.size):
        raise SettingError(f"data.path: images of {source.location} have shape {images.shape[1:]}: not those of {source.name}")
    low, high = int(labels.min()), int(labels.max())
    if num_classes > 0 and not 0 <= low <= high < num_classes:
        raise SettingError(
            f"data.path: labels of the {split} split of {source.location} reach from {low} to {high}, outside "
            f"0..{num_classes - 1}: choose a split with labels, another data.label_column, or correct the data"
        )


@contextlib.contextmanager
def _opened(source: _Source, split: str, images: _Encoded, i: int) -> Iterator[Image.Image]:
    """Opens image i; what is wrong with it, then or while it is used, becomes a SettingError that says which one it is."""
    try:
        with images.open(i) as image:
            if image.mode not in GRAY_MODES | COLOUR_MODES:
                raise ValueError(f"its mode is {image.mode}, not 8 bits per channel")
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SettingError(
            f"data.path: image {i} of the {split} split of {source.location} cannot be used ({error}): correct or remove it"
        ) from error


def _channels(source: _Source, raw: _Raw) -> int:
    """Returns 1 if every image of both splits is grey, else 3. Reads headers only, up to the first image in colour."""
    for split, (images, _) in raw.splits.items():
        for i in range(images.count):
            with _opened(source, split, images, i) as image:
                if image.mode not in GRAY_MODES:
                    return 3
    return 1


def _decode_images(source: _Source, split: str, images: _Encoded, channels: int, target: Path) -> None:
    """Decodes images in threads into a .npy file, uint8 (N, C, size, size)."""
    shape = (images.count, channels, source.size, source.size)
    pixels = np.lib.format.open_memmap(target, mode="w+", dtype=np.uint8, shape=shape)

    def decode(i: int) -> None:
        pixels[i] = _decode_image(source, split, images, i, channels)

    with ThreadPoolExecutor() as pool, tqdm(total=images.count, desc=f"decoding {split}", disable=None) as bar:
        for start in range(0, images.count, CHUNK):
            for _ in pool.map(decode, range(start, min(start + CHUNK, images.count))):
                bar.update()
    pixels.flush()


def _decode_image(source: _Source, split: str, images: _Encoded, i: int, channels: int) -> np.ndarray:
    """Returns one image, upright, resized and cropped: uint8 (channels, size, size)."""
    with _opened(source, split, images, i) as image:
        if source.name in FIXED and image.size != (source.size, source.size):
            raise ValueError(f"its size is {image.size}, not that of {source.name}")
        upright = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
        array = np.asarray(crop(upright, source.size))  # (size, size) or (size, size, 3)
    return array.reshape(source.size, source.size, channels).transpose(2, 0, 1)


class LazyImages:
    """Images of a split that is too large to be kept decoded, as an array uint8 (N, 3, H, W) that decodes what is asked for."""

    def __init__(self, source: _Source, split: str, images: _Encoded) -> None:
        self.shape = (images.count, 3, source.size, source.size)
        self._arguments = source, split, images

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, int):
            return _decode_image(*self._arguments, index, 3)
        with ThreadPoolExecutor() as pool:
            rows = list(pool.map(self.__getitem__, np.arange(len(self))[index].tolist()))
        return np.stack(rows) if rows else np.zeros((0, *self.shape[1:]), np.uint8)


def open_splits(source: _Source, scratch: Path) -> tuple[dict[str, Split], int]:
    """Returns the splits of a set of image files, decoded as they are read, and the number of classes.

    Args:
        scratch: a folder that lives as long as they do; `datasets` keeps its copy of local Parquet files there.
    """
    raw = READERS[source.layout](source, scratch)
    for split, (images, labels) in raw.splits.items():
        _check_split(source, split, images, labels, raw.num_classes)
    return {
        split: Split(LazyImages(source, split, images), labels.astype(np.int64)) for split, (images, labels) in raw.splits.items()
    }, raw.num_classes


def crop(image: Image.Image, size: int) -> Image.Image:
    """Returns the centre of an image as size x size, resized as in ADM and DiT (see `load_images`)."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    shrink = size / min(image.size)
    image = image.resize((round(image.width * shrink), round(image.height * shrink)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _std(counts: np.ndarray) -> float:
    """Returns the standard deviation of pixels / 127.5 - 1 from how often each of the 256 values occurs.

    In whole numbers up to the root, so that every machine measures the same bits.
    """
    tally = [int(count) for count in counts]
    number, first, second = (sum(count * value**power for value, count in enumerate(tally)) for power in (0, 1, 2))
    return math.sqrt(Fraction(number * second - first**2, number**2)) / 127.5
