"""Data: every layout gives the same arrays, every image is seen once an epoch, and what is wrong is said in one sentence."""

import gzip
import json
import multiprocessing
import pickle
import struct
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import data
import image_sets
from config import SettingError
from data import BatchSource, ImageData, Split, check_images, load_images, step_flips, step_indices

TRAIN, TEST = 20, 10  # images per split of the sets that are made here


def settings(folder: Path, name: str, **changes) -> dict:
    """Returns load_images's arguments with the usual values."""
    usual = {
        "name": name,
        "path": None,
        "size": {"digits": 8, "fashion_mnist": 28}.get(name, 32),
        "image_column": None,
        "label_column": None,
        "train_split": "train",
        "test_split": "test",
        "flip": False,
        "scale": None,
        "sigma_data": 0.5,
        "cache": str(folder),
    }
    return {**usual, **{key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}}


def made(channels: int = 3, size: int = 32, classes: int = 10) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns random splits whose labels ascend, the order in which a folder per class lists them."""
    random = np.random.default_rng(0)
    splits = {}
    for name, count in (("train", TRAIN), ("test", TEST)):
        images = random.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
        splits[name] = images, np.arange(count) * classes // count
    return splits


def picture(image: np.ndarray) -> Image.Image:
    """Returns a (C, H, W) array as a Pillow image."""
    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))


def table(splits: dict, label: str = "label", classes: int | None = 10, image: str = "img") -> datasets.DatasetDict:
    """Returns the splits as a `datasets` table; labels are plain integers where `classes` is None."""
    kind = datasets.Value("int64") if classes is None else datasets.ClassLabel(num_classes=classes)
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict({image: [picture(x) for x in images], label: labels.tolist()}, features=features)
            for name, (images, labels) in splits.items()
        }
    )


def write_parquet(folder: Path, splits: dict, **columns) -> Path:
    for name, rows in table(splits, **columns).items():
        (folder / "plain_text").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(folder / "plain_text" / f"{name}-00000-of-00001.parquet")
    return folder


def write_arrow(folder: Path, splits: dict, **columns) -> Path:
    table(splits, **columns).save_to_disk(folder)
    return folder


def five_batches(images: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(np.array_split(images, 5), np.array_split(labels, 5), strict=True))


def write_binary(folder: Path, splits: dict, **_) -> Path:
    """CIFAR-10 in its five training batches, or CIFAR-100 with a coarse label (here 7) before the fine one."""
    folder.mkdir()
    (images, labels), (test_images, test_labels) = splits["train"], splits["test"]
    if labels.max() < 10:
        files = {
            **{f"data_batch_{i + 1}.bin": batch for i, batch in enumerate(five_batches(images, labels))},
            "test_batch.bin": (test_images, test_labels),
        }
    else:
        files = {"train.bin": (images, labels), "test.bin": (test_images, test_labels)}
    for name, (pixels, classes) in files.items():
        head = classes[:, None] if labels.max() < 10 else np.stack([np.full_like(classes, 7), classes], axis=1)
        (folder / name).write_bytes(np.concatenate([head.astype(np.uint8), pixels.reshape(len(pixels), -1)], axis=1).tobytes())
    return folder


def write_pickles(folder: Path, splits: dict, protocol: int = 2, **_) -> Path:
    inner = folder / "cifar-batches-py"  # as unpacked: one level down
    inner.mkdir(parents=True)
    (images, labels), (test_images, test_labels) = splits["train"], splits["test"]
    fine = labels.max() >= 10
    parts = [(images, labels)] if fine else five_batches(images, labels)
    names = ["train", "test"] if fine else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, (pixels, classes) in zip(names, [*parts, (test_images, test_labels)], strict=True):
        content = {b"data": pixels.reshape(len(pixels), -1), b"fine_labels" if fine else b"labels": classes.tolist()}
        (inner / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


def write_folders(folder: Path, splits: dict, test: str = "test", **_) -> Path:
    for name, (images, labels) in splits.items():
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            target = folder / (test if name == "test" else name) / f"class_{label:03d}"
            target.mkdir(parents=True, exist_ok=True)
            picture(image).save(target / f"{i:04d}.png")
    return folder


def write_idx(folder: Path, splits: dict, zipped: bool) -> Path:
    folder.mkdir()
    for prefix, split in (("train", "train"), ("t10k", "test")):
        for kind, array in zip(("images-idx3", "labels-idx1"), splits[split], strict=True):
            array = array[:, 0] if kind == "images-idx3" else array.astype(np.uint8)
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()
            name = f"{prefix}-{kind}-ubyte"
            (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    return folder


def assert_holds(found: ImageData, splits: dict) -> None:
    for split, (images, labels) in ((found.train, splits["train"]), (found.test, splits["test"])):
        assert isinstance(split.images, np.memmap)
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64
        np.testing.assert_array_equal(split.images, images)
        np.testing.assert_array_equal(split.labels, labels)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> ImageData:
    return load_images(**settings(tmp_path_factory.mktemp("cache"), "digits"))


# ------------------------------------------------------------------------------------------------------------------------ digits


def test_digits_are_all_there_and_split_by_class(digits):
    assert (digits.channels, digits.size, digits.num_classes, digits.flip) == (1, 8, 10, False)
    assert (len(digits.train.labels), len(digits.test.labels)) == (1437, 360)
    both = np.concatenate([digits.train.images, digits.test.images]).reshape(1797, 64)
    original = np.round(load_digits().data * 255 / 16).astype(np.uint8)
    np.testing.assert_array_equal(both[np.lexsort(both.T)], original[np.lexsort(original.T)])
    for label in range(10):
        of_class = (digits.train.labels == label).sum() + (digits.test.labels == label).sum()
        assert abs((digits.test.labels == label).sum() - 0.2 * of_class) < 1


def test_measured_scale_gives_sigma_data(digits, tmp_path):
    x = digits.normalize(torch.from_numpy(np.array(digits.train.images)))
    assert x.double().std(correction=0).item() == pytest.approx(0.5, abs=1e-6)
    assert 0.5 / digits.scale == pytest.approx(0.752, abs=5e-4)  # facts.md 11
    assert load_images(**settings(tmp_path, "digits", scale=1.0)).scale == 1.0


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.665, 0.7071, 3.3, 1e-3])
def test_pixels_survive_the_round_trip(digits, scale):
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    scaled = ImageData("made", digits.train, digits.test, 10, scale, "", False)
    x = scaled.normalize(values)
    assert x.dtype == torch.float32
    assert x.abs().max().item() == pytest.approx(scale)
    assert torch.equal(scaled.to_pixels(x), values)
    beyond = torch.tensor([-9.0, 9.0]).reshape(2, 1, 1, 1) * scale
    assert scaled.to_pixels(beyond).flatten().tolist() == [0, 255]


# ------------------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize(("batch_size", "count"), [(4, 10), (10, 10), (7, 3), (23, 10), (1, 1)])
def test_every_image_once_an_epoch(batch_size, count):
    epochs = 5
    steps = -(-epochs * count // batch_size)
    order = np.concatenate([step_indices(0, 1, step, batch_size, count) for step in range(steps)])
    assert order.dtype == np.int64
    for epoch in order[: epochs * count].reshape(epochs, count):
        assert sorted(epoch) == list(range(count))


def test_order_is_a_pure_function_of_its_names():
    here = step_indices(0, 2, 31, 16, 100)
    data._permutation.cache_clear()
    np.testing.assert_array_equal(step_indices(0, 2, 31, 16, 100), here)
    here[:] = 0  # what a caller does with its batch must not reach the next one
    assert step_indices(0, 2, 31, 16, 100).any()
    for other in ((1, 2, 31), (0, 1, 31), (0, 2, 32)):
        assert (step_indices(*other, 16, 100) != step_indices(0, 2, 31, 16, 100)).any()
    first, second = (step_indices(0, 0, epoch, 100, 100) for epoch in (0, 1))
    assert (first != second).any()


def test_flips_are_drawn_per_sample():
    flips = np.stack([step_flips(0, 0, step, 64) for step in range(50)])
    assert flips.dtype == bool
    assert 0.45 < flips.mean() < 0.55
    assert flips.any(axis=1).all()
    assert not flips.all(axis=1).any()
    assert (flips[0] != flips[1]).any()
    assert (step_flips(0, 1, 0, 64) != flips[0]).any()
    np.testing.assert_array_equal(step_flips(0, 0, 7, 64), flips[7])


# ----------------------------------------------------------------------------------------------------------------------- batches


@pytest.fixture
def colours() -> ImageData:
    """A set that may be mirrored."""
    train, test = (Split(*split) for split in made(size=4).values())
    return ImageData("made", train, test, 10, 0.8, "", True)


def test_a_batch_is_what_the_indices_and_flips_say(colours):
    x, labels = BatchSource(colours, "cpu", seed=3).batch(1, 2, 16)
    indices, flips = step_indices(3, 1, 2, 16, TRAIN), step_flips(3, 1, 2, 16)
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(labels, colours.train.labels[indices])
    for image, index, flip in zip(colours.to_pixels(x).numpy(), indices, flips, strict=True):
        original = colours.train.images[index]
        np.testing.assert_array_equal(image, original[..., ::-1] if flip else original)


def test_no_flips_where_the_set_does_not_allow_them(digits):
    x, _ = BatchSource(digits, "cpu", seed=0).batch(0, 5, 32)
    np.testing.assert_array_equal(digits.to_pixels(x), digits.train.images[step_indices(0, 0, 5, 32, 1437)])


@pytest.mark.parametrize("batch_size", [8, 50])
def test_memory_mapped_batches_equal_resident_ones(colours, batch_size):
    resident = BatchSource(colours, "cpu", seed=0)
    mapped = BatchSource(colours, "cpu", seed=0, resident_bytes=0)
    for block, step in [(0, 0), (1, 0), (0, 1), (2, 5), (0, 2), (0, 0)]:
        if step != 5:  # one step that nobody announced
            mapped.prefetch(block, step, batch_size)
            mapped.prefetch(block, step, batch_size)
        resident.prefetch(block, step, batch_size)
        for expected, found in zip(resident.batch(block, step, batch_size), mapped.batch(block, step, batch_size), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("resident_bytes", [0, 2**31])
@pytest.mark.parametrize("announced", [False, True])
def test_rows_are_parts_of_the_whole_batch(colours, resident_bytes, announced):
    source = BatchSource(colours, "cpu", seed=0, resident_bytes=resident_bytes)
    whole = BatchSource(colours, "cpu", seed=0).batch(1, 3, 10)
    if announced:
        source.prefetch(1, 3, 10)
    parts = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        parts.append(source.batch(1, 3, 10, rows))
        source.prefetch(2, 0, 10)  # the next step is announced while this one is read
    for expected, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(expected, torch.cat(found))


def test_prefetch_works_in_the_background_and_its_failure_surfaces(colours, monkeypatch):
    source = BatchSource(colours, "cpu", seed=0, resident_bytes=0)
    gather, threads = source._gather, []

    def failing(indices):
        threads.append(threading.current_thread())
        if len(threads) > 1:
            raise OSError("the disk is gone")
        return gather(indices)

    monkeypatch.setattr(source, "_gather", failing)
    source.prefetch(0, 0, 4)
    source.prefetch(0, 1, 4)
    source.batch(0, 0, 4)
    with pytest.raises(OSError, match="the disk is gone"):
        source.batch(0, 1, 4)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


# ----------------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(("name", "classes", "label"), [("cifar10", 10, "label"), ("cifar100", 100, "fine_label")])
def test_every_cifar_layout_gives_the_same_arrays(tmp_path, name, classes, label):
    splits = made(classes=classes)
    fingerprints = set()
    for write in (write_binary, write_pickles, write_parquet, write_arrow):
        folder = write(tmp_path / write.__name__, splits, label=label, classes=classes)
        found = load_images(**settings(tmp_path / "cache", name, path=folder, flip=True, scale=1.0))
        assert_holds(found, splits)
        assert (found.channels, found.size, found.num_classes, found.flip, found.scale) == (3, 32, classes, True, 1.0)
        fingerprints.add(found.fingerprint)
    assert len(fingerprints) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol(tmp_path, protocol):
    splits = made()
    folder = write_pickles(tmp_path / "archive", splits, protocol=protocol)
    assert_holds(load_images(**settings(tmp_path / "cache", "cifar10", path=folder)), splits)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path, zipped):
    splits = made(channels=1, size=28)
    found = load_images(**settings(tmp_path / "cache", "fashion_mnist", path=write_idx(tmp_path / "raw", splits, zipped)))
    assert_holds(found, splits)
    assert found.num_classes == 10


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("test", ["test", "val"])
def test_image_folders(tmp_path, channels, test):
    splits = made(channels=channels)
    folder = write_folders(tmp_path / "set", splits, test=test)
    found = load_images(**settings(tmp_path / "cache", "image_folder", path=folder))
    assert_holds(found, splits)
    assert (found.channels, found.num_classes) == (channels, 10)
    through_datasets = load_images(**settings(tmp_path / "cache", "hub", path=folder))
    assert through_datasets.fingerprint == found.fingerprint


def test_hub_sets_with_columns_of_their_own(tmp_path):
    splits = made(classes=7)
    folder = write_parquet(tmp_path / "set", splits, image="photo", label="kind", classes=None)
    chosen = settings(tmp_path / "cache", "hub", path=folder, image_column="photo", label_column="kind")
    found = load_images(**chosen)
    assert_holds(found, splits)
    assert found.num_classes == 7
    unlabelled = load_images(**{**chosen, "label_column": "none"})
    assert unlabelled.num_classes == 0
    assert not unlabelled.train.labels.any()


def test_other_sizes_are_cropped_at_the_centre_and_resized(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "set" / split / "a").mkdir(parents=True)
        wide = np.zeros((40, 100, 3), np.uint8)
        wide[:, 30:70] = 255, 128, 0  # the centre square
        Image.fromarray(wide).save(tmp_path / "set" / split / "a" / "wide.png")
        Image.fromarray(np.full((8, 8), 77, np.uint8)).save(tmp_path / "set" / split / "a" / "small_and_grey.png")
    found = load_images(**settings(tmp_path / "cache", "image_folder", path=tmp_path / "set", size=16))
    grey, centre = found.train.images
    assert (grey == 77).all()
    assert (centre[:, :, 2:-2] == np.array([255, 128, 0]).reshape(3, 1, 1)).all()


def test_photographs_are_turned_upright(tmp_path):
    half = np.zeros((32, 32, 3), np.uint8)
    half[:16] = 200  # bright above
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    for split in ("train", "test"):
        (tmp_path / "set" / split / "a").mkdir(parents=True)
        Image.fromarray(half).save(tmp_path / "set" / split / "a" / "0.png", exif=exif)
    found = load_images(**settings(tmp_path / "cache", "image_folder", path=tmp_path / "set"))
    np.testing.assert_array_equal(found.train.images[0].transpose(1, 2, 0), half[::-1])


# ------------------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_is_used_and_follows_the_files(tmp_path, monkeypatch):
    splits = made()
    folder = write_binary(tmp_path / "set", splits)
    chosen = settings(tmp_path / "cache", "cifar10", path=folder)
    decoded = []
    decode = image_sets._decode
    monkeypatch.setattr(image_sets, "_decode", lambda *arguments: decoded.append(1) or decode(*arguments))
    first, second = load_images(**chosen), load_images(**chosen)
    assert first.fingerprint == second.fingerprint
    assert len(decoded) == 1
    splits["test"][0][0] = 0
    content = bytearray((folder / "test_batch.bin").read_bytes())
    content[1:3073] = bytes(3072)
    (folder / "test_batch.bin").write_bytes(content)
    changed = load_images(**chosen)
    assert len(decoded) == 2
    assert_holds(changed, splits)
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("harm", ["cut", "gone", "info"])
def test_a_broken_cache_is_decoded_again(tmp_path, harm):
    chosen = settings(tmp_path / "cache", "digits")
    whole = load_images(**chosen)
    (entry,) = (tmp_path / "cache").iterdir()
    if harm == "cut":
        images = entry / "train_images.npy"
        images.write_bytes(images.read_bytes()[:-1])
    elif harm == "gone":
        (entry / "test_labels.npy").unlink()
    else:
        (entry / "info.json").write_text('{"bytes"')
    again = load_images(**chosen)
    assert again.fingerprint == whole.fingerprint
    assert_holds(again, {"train": (whole.train.images, whole.train.labels), "test": (whole.test.images, whole.test.labels)})
    assert list((tmp_path / "cache").iterdir()) == [entry]
    assert json.loads((entry / "info.json").read_text())["counts"] == [1437, 360]


def _load_at_once(rounds: list[dict], barrier, fingerprints) -> None:
    decode = image_sets._decode

    def together(*arguments):
        barrier.wait()  # both looked before either has written
        decode(*arguments)

    image_sets._decode = together
    for chosen in rounds:
        fingerprints.put(load_images(**chosen).fingerprint)


def test_processes_that_decode_at_once_both_succeed(tmp_path, digits, monkeypatch):
    """This process and another, first into an empty cache, then into one that holds a broken entry."""
    rounds = [settings(tmp_path / cache, "digits") for cache in ("empty", "broken")]
    load_images(**rounds[1])
    (entry,) = (tmp_path / "broken").iterdir()
    (entry / "train_images.npy").write_bytes(b"")
    context = multiprocessing.get_context("spawn")
    barrier, fingerprints = context.Barrier(2, timeout=60), context.Queue()
    other = context.Process(target=_load_at_once, args=(rounds, barrier, fingerprints))
    other.start()
    monkeypatch.setattr(image_sets, "_decode", image_sets._decode)  # so that it is put back
    _load_at_once(rounds, barrier, fingerprints)
    assert [fingerprints.get(timeout=60) for _ in range(4)] == [digits.fingerprint] * 4
    other.join()
    assert other.exitcode == 0
    assert len(list((tmp_path / "empty").iterdir())) == 1
    assert list((tmp_path / "broken").iterdir()) == [entry]
    assert (entry / "train_images.npy").stat().st_size > 1437 * 64


# -------------------------------------------------------------------------------------------------------------- what goes wrong


def test_a_pickle_that_names_code_is_refused_and_runs_nothing(tmp_path):
    class Malicious:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    folder = write_pickles(tmp_path / "archive", made())
    (folder / "cifar-batches-py" / "test_batch").write_bytes(pickle.dumps({"data": Malicious(), "labels": []}))
    with pytest.raises(SettingError, match="only arrays are read"):
        load_images(**settings(tmp_path / "cache", "cifar10", path=folder))
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_unknown_columns_and_splits_are_listed_before_decoding(tmp_path, write):
    folder = write(tmp_path / "set", made(), image="photo", label="kind")
    chosen = settings(tmp_path / "cache", "hub", path=folder)
    with pytest.raises(SettingError, match="data.image_column.*photo, kind"):
        check_images(**chosen)
    with pytest.raises(SettingError, match="data.label_column=sort.*photo, kind"):
        check_images(**{**chosen, "image_column": "photo", "label_column": "sort"})
    with pytest.raises(SettingError, match="data.train_split=training.*test, train"):
        check_images(**{**chosen, "image_column": "photo", "label_column": "kind", "train_split": "training"})
    check_images(**{**chosen, "image_column": "photo", "label_column": "kind"})


def test_a_column_without_images_or_with_text_labels(tmp_path):
    rows = datasets.Dataset.from_dict({"image": [1.5, 2.5], "label": [0, 1], "photo": [b"", b""], "text": ["a", "b"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "set")
    chosen = settings(tmp_path / "cache", "hub", path=tmp_path / "set")
    with pytest.raises(SettingError, match="data.image_column=image .*does not hold images"):
        load_images(**chosen)
    with pytest.raises(SettingError, match="data.label_column=text .*does not hold integers"):
        load_images(**{**chosen, "image_column": "photo", "label_column": "text"})
    with pytest.raises(SettingError, match="image 0 of the train split .*cannot be used"):
        load_images(**{**chosen, "image_column": "photo"})


@pytest.mark.parametrize("label", [-1, 10])
def test_labels_out_of_range(tmp_path, label):
    splits = made()
    splits["test"][1][3] = label
    with pytest.raises(SettingError, match=r"test split .*outside 0\.\.9"):
        if label < 0:
            load_images(**settings(tmp_path / "cache", "hub", path=write_arrow(tmp_path / "set", splits, classes=None)))
        else:
            load_images(
                **settings(
                    tmp_path / "cache", "cifar10", path=write_binary(tmp_path / "set", splits | {"train": made()["train"]})
                )
            )


def test_images_of_another_size_in_a_fixed_set(tmp_path):
    folder = write_parquet(tmp_path / "set", made(size=28))
    with pytest.raises(SettingError, match=r"its size is \(28, 28\), not that of cifar10"):
        load_images(**settings(tmp_path / "cache", "cifar10", path=folder))


def test_images_that_are_missing_or_of_16_bits(tmp_path):
    rows = table(made())
    gap = datasets.Dataset.from_dict({"img": [None], "label": [0]}, features=rows["train"].features)
    datasets.DatasetDict({"train": rows["train"], "test": gap}).save_to_disk(tmp_path / "gap")
    with pytest.raises(SettingError, match="image 0 of the test split .*there is none in this row"):
        load_images(**settings(tmp_path / "cache", "hub", path=tmp_path / "gap"))
    folder = write_folders(tmp_path / "set", made(channels=1))
    deep = folder / "test" / "class_004" / "0004.png"
    Image.fromarray(np.full((32, 32), 40_000, np.uint16)).save(deep)
    with pytest.raises(SettingError, match="image 4 of the test split .*its mode is I;16"):
        load_images(**settings(tmp_path / "cache", "image_folder", path=folder))
    deep.unlink()
    deep.symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(SettingError, match="0004.png cannot be read"):
        load_images(**settings(tmp_path / "cache", "image_folder", path=folder))


def test_a_missing_batch_is_missed(tmp_path):
    """Four of CIFAR-10's five files would train without a word on four fifths of the images."""
    for name, write, file in (("b", write_binary, "data_batch_3.bin"), ("p", write_pickles, "cifar-batches-py/data_batch_3")):
        folder = write(tmp_path / name, made())
        (folder / file).unlink()
        with pytest.raises(SettingError, match="but not data_batch_3"):
            check_images(**settings(tmp_path / "cache", "cifar10", path=folder))


def test_broken_files(tmp_path):
    folder = write_binary(tmp_path / "set", made())
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(SettingError, match="no whole number of images"):
        load_images(**settings(tmp_path / "cache", "cifar10", path=folder))
    parquet, arrow = write_parquet(tmp_path / "parquet", made()), write_arrow(tmp_path / "arrow", made())
    (parquet / "plain_text" / "train-00000-of-00001.parquet").write_bytes(b"no Parquet")
    (arrow / "train" / "state.json").unlink()
    for folder in (parquet, arrow):
        with pytest.raises(SettingError, match="cannot be read as a set of images"):
            check_images(**settings(tmp_path / "cache", "cifar10", path=folder))
    raw = write_idx(tmp_path / "raw", made(channels=1, size=28), zipped=False)
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03abc")
    with pytest.raises(SettingError, match="t10k-images-idx3-ubyte is not a whole IDX file"):
        load_images(**settings(tmp_path / "cache", "fashion_mnist", path=raw))
    (raw / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SettingError, match="lacks Fashion-MNIST's t10k-labels"):
        check_images(**settings(tmp_path / "cache", "fashion_mnist", path=raw))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("svhn", {}, "data.name=svhn is unknown; use one of digits, fashion_mnist"),
        ("digits", {"size": 16}, "data.size=16 does not fit digits"),
        ("digits", {"flip": True}, "data.flip must be false for digits"),
        ("digits", {"path": "/tmp"}, "data.path=/tmp means nothing for digits"),
        ("digits", {"label_column": "label"}, "data.label_column=label means nothing for digits"),
        ("digits", {"test_split": "validation"}, "data.train_split and data.test_split must be train and test"),
        ("digits", {"scale": 0.0}, "data.scale=0.0 must be a positive number"),
        ("digits", {"sigma_data": float("nan")}, "objective.sigma_data=nan must be a positive number"),
        ("digits", {"cache": "/dev/null/cache"}, "data.cache=/dev/null/cache cannot be written"),
        ("image_folder", {}, "data.path is needed"),
        ("image_folder", {"size": 0}, "data.size=0 must be at least 1"),
        ("image_folder", {"path": "/nowhere"}, "data.path=/nowhere is not a folder"),
        ("cifar10", {"path": "/nowhere"}, "data.path=/nowhere is not a folder"),
        ("hub", {"path": "/nowhere"}, "data.path=/nowhere is not a folder"),
        ("hub", {}, "data.path is needed"),
    ],
)
def test_wrong_settings(tmp_path, name, changes, message):
    with pytest.raises(SettingError, match=message) as raised:
        check_images(**settings(tmp_path / "cache", name, **changes))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_folders_that_hold_something_else(tmp_path):
    (tmp_path / "set").mkdir()
    for name, message in (
        ("cifar10", "no known layout"),
        ("fashion_mnist", "holds no train-images"),
        ("image_folder", "data.train_split=train is not in"),
        ("hub", "cannot be read as a set of images"),
    ):
        with pytest.raises(SettingError, match=message):
            check_images(**settings(tmp_path / "cache", name, path=tmp_path / "set"))


def test_without_network_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    import huggingface_hub
    import torchvision.datasets.mnist

    def unreachable(*arguments, **keywords):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(SettingError, match="Hugging Face.* cannot be reached .*data.path to a local folder"):
        check_images(**settings(tmp_path / "cache", "cifar10"))
    monkeypatch.setattr(image_sets, "FASHION_DEBIAN", tmp_path / "not_installed")
    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", unreachable)
    with pytest.raises(SettingError, match="apt-get install dataset-fashion-mnist"):
        check_images(**settings(tmp_path / "cache", "fashion_mnist"))
    assert list((tmp_path / "cache").iterdir()) == []
