"""Images in one directory per class, and their patches as examples."""

import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bptjax.data.config import DataConfig
from bptjax.data.examples import Example
from bptjax.data.files import Location
from bptjax.data.text import split_documents
from bptjax.ops.labels import IGNORED
from bptjax.ops.patches import cut_patches
from bptjax.run.json_files import read_json

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
# Pillow's names of image formats. Pillow guesses the format from the content, and would run another
# program for some formats.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
PROCESSOR = "preprocessor_config.json"
# Names of the same processor in several versions of transformers.
PROCESSORS = (
    "ViTImageProcessor",
    "ViTImageProcessorFast",
    "ViTImageProcessorPil",
    "ViTFeatureExtractor",
)
# Settings of a processor in pixels, and their largest value as a multiple of the model's size.
SIZES, LARGEST = ("size", "crop_size", "pad_size"), 8
# Pillow's modes with more than 8 bits per channel, which it would clip.
WIDE_MODES = "I", "F"


@dataclass(frozen=True)
class Image:
    """The file of an image, and the name of its class."""

    path: Path
    name: str


class ImageFolder(Sequence[Any]):
    """The images of a directory with one directory per class, sorted by class name and file name.

    Attributes:
      names: the names of the classes.
      counts: number of images of each class.
      paths: the files of the images.

    Raises:
      ValueError: there are no directories of classes, one is empty, or an image is elsewhere.
    """

    def __init__(self, root: str):
        directory = os.path.expanduser(root)
        if not os.path.isdir(directory):
            raise ValueError(f"{root!r}: must be a directory, with a directory for each class")
        folders = _folders(directory)
        if not folders:
            raise ValueError(f"{root!r}: must hold a directory for each class; it has none")
        self.names, self.counts = [os.path.basename(folder) for folder in folders], []
        self.paths: list[str] = []
        if strange := [name for name in self.names if not name.isprintable()]:
            raise ValueError(f"{strange[0]!r}: must be a printable name of a class; rename it")
        # Directories of splits must not be mistaken for classes.
        deeper = (path for folder in folders for inner in _folders(folder) for path in _all(inner))
        if stray := next(itertools.chain(_images(directory), deeper), None):
            raise ValueError(
                f"{stray}: must be in the directory of a class, one level below {root!r}"
            )
        for folder in folders:
            files = _images(folder)
            if not files:
                raise ValueError(
                    f"{folder!r}: must hold an image of its class ({', '.join(EXTENSIONS)}); "
                    "remove the directory if there is none"
                )
            self.counts.append(len(files))
            self.paths += files

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image:
        file = Path(self.paths[index])
        return Image(file, file.parent.name)

    def location(self, index: int) -> Location:
        return Location(self.paths[index])


def _visible(directory: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _folders(directory: str) -> list[str]:
    return sorted(entry.path for entry in _visible(directory) if entry.is_dir())


def _images(directory: str) -> list[str]:
    files = (x for x in _visible(directory) if x.name.lower().endswith(EXTENSIONS))
    # Keep broken links: they are bad records, not absent ones.
    return sorted(entry.path for entry in files if not entry.is_dir())


def _all(directory: str) -> Iterator[str]:
    for folder, _, _ in os.walk(directory):
        yield from _images(folder)


def open_images(config: DataConfig) -> tuple[ImageFolder, Sequence[Any], Sequence[Any]]:
    """Opens the images at `data.path`. Returns (all, training images, held-out images).

    Raises:
      ValueError: there are no directories of at least two classes.
    """
    classes = _open("path", config.path)
    if len(classes.names) < 2:
        raise ValueError(
            f"data.path={config.path}: must hold the directories of at least 2 classes, not only "
            f"{classes.names[0]!r}"
        )
    if config.eval_path is None:
        how = config.eval_fraction, config.split_seed
        train, held_out = split_documents(classes, *how, classes.counts)
        assert isinstance(train, Sequence)
        return classes, train, held_out
    held_out = _open("eval_path", config.eval_path)
    if unknown := [name for name in held_out.names if name not in classes.names]:
        raise ValueError(
            f"data.eval_path={config.eval_path}: class {unknown[0]!r}: must be in "
            f"data.path={config.path} too"
        )
    return classes, classes, held_out


def _open(key: str, path: str | list[str] | None) -> ImageFolder:
    if not isinstance(path, str):
        raise ValueError(f"data.{key}={path}: must be a directory, with a directory for each class")
    try:
        return ImageFolder(path)
    except ValueError as error:
        raise ValueError(f"data.{key}: {error}") from error


@dataclass(frozen=True)
class ImageProcessor:
    """Converts images to examples, by the settings in a checkpoint's preprocessor_config.json.

    Attributes:
      directory: directory of the checkpoint.
      size: channels, height and width of the model's images.
      patch: height and width of a patch.
      names: the names of the model's classes, by number.
    """

    directory: Path
    size: tuple[int, int, int]
    patch: tuple[int, int]
    names: list[str]

    def check(self) -> None:
        """Checks that the processor makes images of the model's size.

        Raises:
          ValueError: the processor does not, or is not ViT's.
        """
        from PIL import Image as pillow

        # An arbitrary size that is not square.
        blank = pillow.new("L" if self.size[0] == 1 else "RGB", (37, 23))
        file = self.directory / PROCESSOR
        read_json(file)  # Raises errors that name the file.
        try:
            pixels = self._pixels(blank)
        except Exception as error:
            # transformers raises errors of any class for settings that it refuses.
            raise ValueError(f"{file}: {' '.join(str(error).split())}") from error
        if pixels.shape != self.size:
            raise ValueError(
                f"{file}: must make images of the model's size {_sizes(self.size)}, not of "
                f"{_sizes(pixels.shape)}; correct size and do_resize"
            )
        if not np.isfinite(pixels).all():
            raise ValueError(f"{file}: image_std: must not be 0")

    def __call__(self, image: Image) -> list[Example]:
        """Returns the example of an image: a blank token with the class as label, then patches.

        Raises:
          ValueError: the file is damaged, or has more than 8 bits per channel.
        """
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError

        try:
            data = image.path.read_bytes()
            with pillow.open(io.BytesIO(data), formats=FORMATS) as opened:
                if opened.mode.startswith(WIDE_MODES):
                    raise ValueError(
                        f"mode {opened.mode}: must have 8 bits per channel; convert it"
                    )
                upright = ImageOps.exif_transpose(opened)
                if "transparency" in upright.info:
                    upright = upright.convert("RGBA")
                upright = upright.convert("L" if self.size[0] == 1 else "RGB")
                self._check_resized(upright.size)
        except Exception as error:
            # Pillow's decoders raise errors of any class for damaged files.
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                text = f"must be {', '.join(FORMATS)}"
            raise ValueError(f"cannot be read as an image: {text}") from error
        patches = cut_patches(self._pixels(upright), self.patch)
        labels = np.full(len(patches) + 1, IGNORED, np.int32)
        labels[0] = self.names.index(image.name)
        return [{"tokens": np.pad(patches, ((1, 0), (0, 0))), "labels": labels}]

    def _pixels(self, image: Any) -> np.ndarray:
        return self._processor(image, return_tensors="np")["pixel_values"][0].astype(np.float32)

    def _check_resized(self, sides: tuple[int, int]) -> None:
        """Checks that an image does not become larger than Pillow reads images.

        Raises:
          ValueError: the processor keeps the sides' ratio, and one is much longer.
        """
        from PIL import Image as pillow

        most = pillow.MAX_IMAGE_PIXELS
        shortest = getattr(self._processor.size, "shortest_edge", None) or 0
        if most is not None and shortest**2 * max(sides) / min(sides) > most:
            raise ValueError(f"{sides[0]} × {sides[1]} pixels: one side is too long; crop it")

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        raw = read_json(self.directory / PROCESSOR)
        name = raw.get("image_processor_type", raw.get("feature_extractor_type", PROCESSORS[0]))
        if name not in PROCESSORS:
            raise ValueError(
                f"image_processor_type={name!r}: must be one of {', '.join(PROCESSORS)}"
            )
        most = LARGEST * max(self.size[1:])
        for key in SIZES:
            sides = raw[key].values() if isinstance(raw.get(key), dict) else [raw.get(key)]
            if any(isinstance(side, int | float) and side > most for side in sides):
                raise ValueError(f"{key}={raw[key]}: must have at most {most} pixels per side")
        return ViTImageProcessorPil.from_dict(raw)


def _sizes(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
