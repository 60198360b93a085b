"""The data sets, whole, in memory: MNIST and CIFAR-10 as tensorflow-datasets has prepared them, digits as scikit-learn
brings them. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np

DATA = ("digits", "mnist", "cifar10")
TEST_EXAMPLES = {"digits": 360, "mnist": 10000, "cifar10": 10000}


class MissingDataError(Exception):
    """The data set is not where it was looked for; the message names the path."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Images uint8 [n, height, width, channels] and labels int32 [n]; `brightest` is the largest value of a pixel."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    brightest: int = 255


def load(name: str, data_dir: str | pathlib.Path | None, train_examples: int = 0) -> Data:
    """A data set.

    Args:
      name: one of `DATA`.
      data_dir: the folder that tensorflow-datasets has prepared it in; digits needs none.
      train_examples: only the first so many training examples; 0: all.

    Raises:
      ValueError: an unknown name.
      MissingDataError: it is not in data_dir.
    """
    if name not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}, got {name!r}")
    data = _digits() if name == "digits" else _prepared(name, data_dir)
    if train_examples:
        some = slice(0, train_examples)
        return dataclasses.replace(data, train_images=data.train_images[some], train_labels=data.train_labels[some])
    return data


def _digits() -> Data:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.uint8)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))  # neighbours are by the same hand
    test, train = order[:360], order[360:]
    return Data(images[train], labels[train], images[test], labels[test], brightest=16)


def _prepared(name: str, data_dir) -> Data:
    if data_dir is None:
        raise MissingDataError(f"{name} needs --data_dir, the folder in which tensorflow-datasets has prepared it")
    folder = pathlib.Path(data_dir).expanduser().resolve()
    found = sorted(folder.glob(f"{name}/*/dataset_info.json"), key=_version)
    if not found:
        # Asked for data that it does not have, tensorflow-datasets would try to download it.
        raise MissingDataError(
            f"no {name} found: looked for {folder}/{name}/*/dataset_info.json. Name the folder that "
            "tensorflow-datasets has prepared by --data_dir, or prepare it, with a network: python -c 'import "
            f'tensorflow_datasets as tfds; tfds.load("{name}", data_dir="{folder}")\''
        )
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(found[-1].parent)
    arrays = []
    for part in builder.as_dataset(split=["train", "test"], batch_size=-1, as_supervised=True):
        images, labels = part
        arrays += [images.numpy(), labels.numpy().astype(np.int32)]
    return Data(*arrays)


def _version(dataset_info: pathlib.Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", dataset_info.parent.name)]
