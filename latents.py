"""Images as the latents of an autoencoder: encoded once, read by index in training, decoded when a model is sampled.

    latents.json               what they are: VAE, its scale, crop, counts, and a checksum per shard; written last
    plan.json                  the same without what is only known at the end; an encoding that was cut off goes on by it
    train_000000.npy           float16 (n, 2, 2, C, H, W): image and mirror image; mean and deviation of the posterior
    train_labels.npy           int64 (N,)
    statistics/                what scoring computed of the images, see evaluation
    images/                    Hugging Face's copy of local Parquet files, where the images are that

The VAE maps a mirrored image to something else than the mirrored latent, so both are encoded. Means and deviations are kept, not
draws, so that every step of training can draw anew.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import image_sets
from config import LatentsConfig, SettingError, require
from data import BatchSource, ImageData, step_flips
from files import checksum, differences, write_atomically
from hardware import to_device
from image_sets import Split
from parallel import World
from randomness import generator

FORMAT = 1
CROP = "centre, resized as in ADM and DiT"  # image_sets.crop
GATED = "ILSVRC/imagenet-1k"  # on Hugging Face
SPLITS = ("train", "test")
CHECKED_IMAGES = 256  # whose latents are measured when a set is opened
SCALE_TOLERANCE = 0.1  # by which their deviation may differ from that of all


# ---------------------------------------------------------------------------------------------------------------------
# The autoencoder


@functools.lru_cache(maxsize=1)
def load_vae(name: str, device: torch.device) -> nn.Module:
    """Returns a pre-trained AutoencoderKL, in float32.

    Args:
        name: on Hugging Face, or a folder that diffusers saved.

    Raises:
        SettingError: diffusers is not installed, or there is no such VAE.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise SettingError("data.vae needs diffusers, which is not installed: `pip install '.[latents]'`") from None
    try:
        vae = AutoencoderKL.from_pretrained(name, use_safetensors=True, low_cpu_mem_usage=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingError(
            f"data.vae={name} cannot be loaded ({reason}): give an AutoencoderKL's name on Hugging Face, or its folder"
        ) from None
    return vae.to(device).eval().requires_grad_(False)


def weights_digest(vae: nn.Module) -> str:
    """Returns the sha256 of a VAE's weights: another VAE under the same name has another."""
    found = hashlib.sha256()
    for name, value in sorted(vae.state_dict().items()):
        found.update(name.encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


@torch.inference_mode()
def encode_batch(vae: nn.Module, images: np.ndarray) -> np.ndarray:
    """Returns the posteriors of images and of their mirror images.

    Args:
        images: uint8 (n, 3, S, S).

    Returns:
        float16 (n, 2, 2, C, H, W): as they are and mirrored; mean and standard deviation.
    """
    x = torch.from_numpy(images).to(vae.device).float() / 127.5 - 1
    posteriors = [vae.encode(view).latent_dist for view in (x, x.flip(-1))]
    both = torch.stack([torch.stack([posterior.mean, posterior.std], 1) for posterior in posteriors], 1)
    encoded = both.half().cpu().numpy()
    require(bool(np.isfinite(encoded).all()), "data.vae: its latents do not fit float16: use another VAE")
    return encoded


@torch.inference_mode()
def decode(x: Tensor, scale: float, settings: LatentsConfig) -> Tensor:
    """Returns latents in model units (n, C, H, W) as images, uint8 (n, 3, S, S), decoded on their device, batch by batch.

    Args:
        scale: model units per latent in the VAE's own scale.
    """
    vae = load_vae(settings.vae, x.device)
    images = []
    for batch in (x.float() / (scale * vae.config.scaling_factor)).split(settings.batch_size):
        decoded = vae.decode(batch).sample
        images.append(((decoded + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
    return torch.cat(images)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def shard_folder(settings: LatentsConfig) -> Path:
    """Returns the folder of a set's shards."""
    return Path(settings.cache).expanduser() / settings.name


def find_images(settings: LatentsConfig) -> image_sets._Source:
    """Returns where the images are, without reading them.

    Raises:
        SettingError: they are not there, or a token is needed.
    """
    path = settings.path or GATED
    folder = Path(path).expanduser()
    tables = (folder / "dataset_dict.json").exists() or any(next(folder.glob(p), None) for p in ("*.parquet", "*/*.parquet"))
    name = "image_folder" if folder.is_dir() and not tables else "hub"
    if path == GATED:
        require_token()
    test_split = settings.test_split or ("test" if folder.is_dir() else "validation")
    columns = settings.image_column, settings.label_column
    cache = Path(settings.cache).expanduser()
    return image_sets.locate(name, path, settings.image_size, *columns, settings.train_split, test_split, cache)


def require_token() -> None:
    """Refuses to ask for ImageNet without a token, unless Hugging Face's own cache is all that may be asked."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    require(
        is_offline_mode() or get_token() is not None,
        f"data.path={GATED} is given out on request and needs a token: accept the terms on https://huggingface.co/datasets/"
        f"{GATED} and log in with `hf auth login`, or set data.path to a folder of images",
    )


def check_encode(settings: LatentsConfig) -> None:
    """Refuses what cannot work before the VAE is loaded: images, names, the cache."""
    image_sets.check_values("image_folder", settings.image_size, settings.flip, settings.scale, 1.0, settings.cache)
    find_images(settings)


def encode(settings: LatentsConfig, device: torch.device, world: World, progress: bool) -> None:
    """Encodes both splits into the set's folder; cut off, it goes on after the last whole batch.

    A shard is whole batches, and the processes divide the shards, so that how many they are changes no byte.

    Raises:
        SettingError: images, VAE or disk that do not do, or a folder with other latents.
    """
    folder = shard_folder(settings)
    vae = load_vae(settings.vae, device)
    with world.in_turn():
        splits, num_classes = image_sets.open_splits(find_images(settings), folder / "images")
        plan = make_plan(settings, splits, num_classes, vae)
        begin(folder, plan, splits)
    if (folder / "latents.json").exists():
        print(f"{folder} is encoded already")
        return
    mine = shard_ranges(plan)[world.rank :: world.size]
    total = sum(stop - start for _, _, start, stop in mine)
    with tqdm(total=total, unit="image", desc="encoding", disable=not (progress and world.first)) as bar:
        for name, split, start, stop in mine:
            encode_shard(folder / name, splits[split].images, start, stop, vae, plan, bar)
    world.wait()
    if world.first:
        finish(folder, plan)
        shutil.rmtree(folder / "images", ignore_errors=True)


def make_plan(settings: LatentsConfig, splits: dict[str, Split], num_classes: int, vae: nn.Module) -> dict[str, Any]:
    """Returns what is encoded, and how: what must agree when an encoding goes on.

    Raises:
        SettingError: the VAE or the images do not fit the settings.
    """
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = [vae.config.latent_channels, settings.image_size // factor, settings.image_size // factor]
    wanted = [settings.channels, settings.size, settings.size]
    require(
        shape == wanted and settings.image_size % factor == 0,
        f"data.vae={settings.vae} makes latents of {shape} from {settings.image_size} pixels: set data.channels and data.size to "
        f"that, not {wanted}",
    )
    require(settings.num_classes in (0, num_classes), f"data.num_classes={settings.num_classes}: the images have {num_classes}")
    return {
        "format": FORMAT,
        "vae": settings.vae,
        "vae_sha256": weights_digest(vae),
        "vae_scale": vae.config.scaling_factor,
        "image_size": settings.image_size,
        "crop": CROP,
        "shape": shape,
        "num_classes": num_classes,
        "batch_size": settings.batch_size,
        "shard_size": settings.shard_size,
        "counts": {split: len(splits[split].labels) for split in SPLITS},
        "labels": {split: hashlib.sha256(splits[split].labels.tobytes()).hexdigest() for split in SPLITS},
    }


def begin(folder: Path, plan: dict[str, Any], splits: dict[str, Split]) -> None:
    """Writes plan and labels, or makes sure that what is there was begun by the same plan."""
    path = folder / "plan.json"
    if path.exists():
        found = differences(plan, read_json(path))
        require(
            not found, f"data.cache: {folder} holds other latents ({'; '.join(found[:3])}): name another folder, or remove it"
        )
        return
    needed = sum(plan["counts"].values()) * image_bytes(plan)
    free = shutil.disk_usage(folder).free
    require(
        needed < free, f"data.cache: the latents take {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f}: name another disk"
    )
    with written(folder):
        for split in SPLITS:
            np.save(folder / f"{split}_labels.npy", splits[split].labels)
        write_atomically(path, json.dumps(plan, indent=1) + "\n")


def image_bytes(plan: dict[str, Any]) -> int:
    """Returns what one image takes in a shard: two views, mean and deviation, two bytes a number."""
    return 2 * 2 * 2 * int(np.prod(plan["shape"]))


def shard_ranges(plan: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Returns file name, split, first image and the one after the last of every shard."""
    return [
        (f"{split}_{index:06d}.npy", split, start, min(start + plan["shard_size"], plan["counts"][split]))
        for split in SPLITS
        for index, start in enumerate(range(0, plan["counts"][split], plan["shard_size"]))
    ]


def encode_shard(
    path: Path, images: image_sets.LazyImages, start: int, stop: int, vae: nn.Module, plan: dict[str, Any], bar: tqdm
) -> None:
    """Encodes images start..stop into one file, which has its name when it is whole and its checksum is known."""
    if path.exists():
        bar.update(stop - start)
        return
    batch, size, count = plan["batch_size"], image_bytes(plan), stop - start
    part = path.with_suffix(".part")
    with written(path.parent):
        with open(part, "r+b" if part.exists() else "w+b") as file, ThreadPoolExecutor(max_workers=1) as reader:
            header = {"descr": "<f2", "fortran_order": False, "shape": (count, 2, 2, *plan["shape"])}
            np.lib.format.write_array_header_1_0(file, header)
            first_byte = file.tell()
            made = max(part.stat().st_size - first_byte, 0) // size
            made = made if made == count else made // batch * batch  # the last batch may be smaller
            file.truncate(first_byte + made * size)
            file.seek(0, os.SEEK_END)
            bar.update(made)
            upcoming: Future = reader.submit(images.__getitem__, slice(start + made, min(start + made + batch, stop)))
            for at in range(start + made, stop, batch):
                pixels = upcoming.result()
                upcoming = reader.submit(images.__getitem__, slice(at + batch, min(at + 2 * batch, stop)))
                file.write(encode_batch(vae, pixels).tobytes())
                bar.update(len(pixels))
            file.flush()
            os.fsync(file.fileno())
        described = {"name": path.name, "images": count, "sha256": checksum(part), **moments(part)}
        write_atomically(path.with_suffix(".json"), json.dumps(described))
        os.replace(part, path)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Says in a sentence that the disk does not take what is written; what is whole stays, and what is not has no final name."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"data.cache: {folder} cannot be written ({error.strerror}): make room, and the same command goes on from here"
        ) from error


def moments(path: Path) -> dict[str, float]:
    """Returns the sum of a shard's latents over posterior draws, both views, and that of their squares."""
    latents = np.load(path, mmap_mode="r")
    total = squares = 0.0
    for start in range(0, len(latents), image_sets.CHUNK):
        chunk = latents[start : start + image_sets.CHUNK].astype(np.float64)  # (n, 2, 2, C, H, W)
        total += float(chunk[:, :, 0].sum())
        squares += float(np.square(chunk).sum())  # E[(mean + std noise)^2] = mean^2 + std^2
    return {"sum": total, "sum_of_squares": squares}


def finish(folder: Path, plan: dict[str, Any]) -> None:
    """Writes latents.json: the plan, every shard's checksum, the standard deviation of the train split, the fingerprint."""
    shards = [json.loads((folder / name).with_suffix(".json").read_text()) for name, *_ in shard_ranges(plan)]
    train = [shard for shard in shards if shard["name"].startswith("train")]
    numbers = 2 * plan["counts"]["train"] * int(np.prod(plan["shape"]))
    mean = sum(shard["sum"] for shard in train) / numbers
    std = (sum(shard["sum_of_squares"] for shard in train) / numbers - mean**2) ** 0.5 * plan["vae_scale"]
    require(np.isfinite(std) and std > 0, f"data.vae={plan['vae']}: the latents' standard deviation is {std}: use another VAE")
    content = json.dumps([plan, [(shard["name"], shard["sha256"]) for shard in shards]], sort_keys=True)
    info = {**plan, "std": std, "fingerprint": hashlib.sha256(content.encode()).hexdigest(), "shards": shards}
    with written(folder):
        write_atomically(folder / "latents.json", json.dumps(info, indent=1) + "\n")
    for shard in shards:
        (folder / shard["name"]).with_suffix(".json").unlink()
    print(f"{folder}: {' and '.join(f'{count} {split}' for split, count in plan['counts'].items())} images, {describe(info)}")


def describe(info: dict[str, Any]) -> str:
    """Returns in words by what latents were made and how large they are."""
    return f"latents of {info['vae']}, whose scale is {info['vae_scale']}; in it their standard deviation is {info['std']:.4f}"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Shards:
    """A split's shards as one array, float16 (N, 2, 2, C, H, W), of which only what is asked for is read."""

    def __init__(self, paths: list[Path]) -> None:
        self._parts = [np.load(path, mmap_mode="r") for path in paths]
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self.shape = (int(self._starts[-1]), *self._parts[0].shape[1:])
        self.nbytes = sum(part.nbytes for part in self._parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        wanted = np.arange(len(self))[index]
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        found = np.empty((len(wanted), *self.shape[1:]), np.float16)
        for owner in np.unique(owners):
            own = owners == owner
            found[own] = self._parts[owner][wanted[own] - self._starts[owner]]
        return found


@dataclass(frozen=True, eq=False)
class LatentData:
    """An encoded set, as training, held-out loss and scores read it.

    Attributes:
        scale: model units per latent in the VAE's own scale.
        factor: model units per latent as the VAE gives it, and as it is stored.
        flip: whether training may take a mirror image's latents.
    """

    train: Split
    test: Split
    scale: float
    factor: float
    fingerprint: str
    flip: bool
    settings: LatentsConfig

    def draw(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Returns draws from posteriors in model units, float32 (n, C, H, W), of means and deviations (n, 2, C, H, W)."""
        mean, std = latents.float().unbind(1)
        return (mean + std * noise) * self.factor

    def heldout(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the first held-out images in model units, each a draw that is always the same, and their labels."""
        latents = torch.from_numpy(self.test.images[:count][:, 0])  # (n, 2, C, H, W)
        noise = torch.randn(latents[:, 0].shape, generator=generator(0, "heldout_posterior"))
        return self.draw(latents, noise), torch.from_numpy(self.test.labels[:count].copy())

    @functools.cached_property
    def pixels(self) -> ImageData:
        """The images that samples are scored against, read from where they were encoded from."""
        folder = shard_folder(self.settings)
        splits, num_classes = image_sets.open_splits(find_images(self.settings), folder / "images")
        for split in SPLITS:
            own = getattr(self, split).labels
            require(
                np.array_equal(splits[split].labels, own),
                f"data.path: the {split} images found now are not those that were encoded: name the folder of those",
            )
        return ImageData(
            self.settings.name,
            *(splits[split] for split in SPLITS),
            num_classes,
            scale=1.0,
            fingerprint=self.fingerprint,
            flip=self.flip,
            statistics=folder / "statistics",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns what a file of the set holds.

    Raises:
        SettingError: it was damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(
            f"data.cache: {path} is damaged ({error}): bring the file back, or encode into another folder"
        ) from None


def read_labels(folder: Path, split: str) -> np.ndarray:
    """Returns a split's labels, (N,) int64.

    Raises:
        SettingError: the file is missing or was cut off.
    """
    path = folder / f"{split}_labels.npy"
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise SettingError(f"data.cache: {path} cannot be read ({error}): bring it back, or encode into another folder") from None


def read_info(settings: LatentsConfig) -> dict[str, Any]:
    """Returns latents.json after comparing it with the settings.

    Raises:
        SettingError: there is none, or it describes other latents.
    """
    folder = shard_folder(settings)
    path = folder / "latents.json"
    require(path.is_file(), f"data.cache: {folder} holds no latents: run mode=encode with the same settings first")
    info = read_json(path)
    wanted = {"format": FORMAT, "vae": settings.vae, "image_size": settings.image_size}
    wanted["shape"] = [settings.channels, settings.size, settings.size]
    found = differences(wanted, {key: info.get(key) for key in wanted}, "data")
    require(not found, f"{path} does not fit: {'; '.join(found)}: encode into another data.cache")
    require(
        settings.num_classes in (0, info["num_classes"]),
        f"data.num_classes={settings.num_classes}: the images have {info['num_classes']}",
    )
    return info


def check(settings: LatentsConfig, decodes: bool, scores: bool) -> None:
    """Refuses latents that do not fit, a VAE that cannot be had or is another than the one that made them, missing images.

    Args:
        decodes: whether samples will be drawn.
        scores: whether they will be scored, against the images that were encoded.
    """
    info = read_info(settings)
    if scores:
        find_images(settings)
    if decodes:
        vae = load_vae(settings.vae, torch.device("cpu"))
        require(
            weights_digest(vae) == info["vae_sha256"],
            f"data.vae={settings.vae} has other weights than the VAE that made {shard_folder(settings)}: name that one",
        )


def load(settings: LatentsConfig, sigma_data: float) -> LatentData:
    """Opens an encoded set; every shard's checksum is compared unless it was before and the file is unchanged.

    Raises:
        SettingError: missing, changed or other latents.
    """
    info, folder = read_info(settings), shard_folder(settings)
    verify(folder, info["shards"])
    splits = [
        Split(
            Shards([folder / name for name, own, *_ in shard_ranges(info) if own == split]),
            read_labels(folder, split),
        )
        for split in SPLITS
    ]
    for split, part in zip(SPLITS, splits, strict=True):
        require(
            hashlib.sha256(part.labels.tobytes()).hexdigest() == info["labels"][split],
            f"{folder / split}_labels.npy is not the file that was written: encode again",
        )
    scale = settings.scale or sigma_data / info["std"]
    data = LatentData(*splits, scale, scale * info["vae_scale"], info["fingerprint"], settings.flip, settings)
    check_scale(data, scale * info["std"])
    print(f"{describe(info)}: data scaled by {scale:.4f}")
    return data


def verify(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Compares every shard with its checksum; what was compared before and has not changed since is not read again."""
    path = folder / "verified.json"
    known = read_json(path) if path.exists() else {}
    stamps = {}
    for shard in tqdm(shards, desc="checksums", disable=None):
        file = folder / shard["name"]
        require(file.is_file(), f"data.cache: {file} is missing: run mode=encode again in another folder, or bring it back")
        stamps[shard["name"]] = [file.stat().st_size, file.stat().st_mtime_ns, shard["sha256"]]
        if known.get(shard["name"]) != stamps[shard["name"]]:
            require(
                checksum(file) == shard["sha256"],
                f"data.cache: {file} does not have the checksum of latents.json: bring the file back, or encode again",
            )
    if stamps != known and os.access(folder, os.W_OK):
        write_atomically(path, json.dumps(stamps))


def check_scale(data: LatentData, expected: float) -> None:
    """Compares the deviation of some training latents, spread over the split, in model units with what it should be."""
    chosen = np.unique(np.linspace(0, len(data.train.labels) - 1, CHECKED_IMAGES).astype(int))
    latents = torch.from_numpy(data.train.images[chosen][:, 0])
    found = float(data.draw(latents, torch.randn(latents[:, 0].shape, generator=generator(0, "check_scale"))).std())
    require(
        abs(found / expected - 1) < SCALE_TOLERANCE,
        f"data.scale: {len(chosen)} training latents have a standard deviation of {found:.3f}, not {expected:.3f}: encode again",
    )


class LatentSource(BatchSource):
    """Training batches of latents by block and step; see BatchSource, which gathers them."""

    def __init__(self, data: LatentData, device: torch.device | str, *, seed: int) -> None:
        super().__init__(data, device, seed=seed, resident_bytes=-1)

    def batch(self, block: int, step: int, batch_size: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Returns the `rows` part of a step's batch, on the device.

        Returns:
            x: float32 (n, C, H, W) in model units, each a draw from the posterior of an image or of its mirror image.
            labels: int64 (n,).
        """
        latents, labels = self._pixels(block, step, batch_size, rows)
        latents = to_device(latents, self.device)  # (n, 2, 2, C, H, W)
        views = torch.from_numpy(step_flips(self.seed, block, step, batch_size)[rows]).long() * int(self.data.flip)
        chosen = latents[torch.arange(len(latents), device=self.device), to_device(views, self.device)]  # (n, 2, C, H, W)
        stream = generator(self.seed, "posterior", block, step, device=self.device)
        noise = torch.randn((batch_size, *chosen.shape[2:]), generator=stream, device=self.device)[rows]
        return self.data.draw(chosen, noise), to_device(labels, self.device)
