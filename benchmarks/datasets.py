"""Real data, in their original formats, from the folder that PACKHORSE_DATA names."""

import csv
import gzip
import io
import os
import tarfile
from pathlib import Path

import torch
from torch import Tensor

Split = tuple[Tensor, Tensor]  # x, y


def find_data() -> Path:
    folder = os.environ.get("PACKHORSE_DATA")
    if not folder:
        raise SystemExit("set PACKHORSE_DATA to the folder of data sets")
    return Path(folder)


def read_idx(path: Path) -> Tensor:
    """One of MNIST's files: a magic number, sizes, bytes."""
    raw = gzip.decompress(path.read_bytes())
    dimensions = raw[3]
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.frombuffer(bytearray(raw[4 + 4 * dimensions :]), dtype=torch.uint8).view(sizes)


def load_emnist() -> tuple[Split, Split]:
    """EMNIST Letters, official split: images [rows, 784], normalised, classes 0 to 25."""
    folder = find_data() / "emnist-letters"
    splits = []
    for split in ("train", "test"):
        images = read_idx(folder / f"emnist-letters-{split}-images-idx3-ubyte.gz").float().div_(255).flatten(1)
        labels = read_idx(folder / f"emnist-letters-{split}-labels-idx1-ubyte.gz").long() - 1
        splits.append((images, labels))
    mean, deviation = splits[0][0].mean(), splits[0][0].std()
    (train, test) = [((images - mean) / deviation, labels) for images, labels in splits]
    return train, test


def load_cifar() -> tuple[Split, Split]:
    """CIFAR-10 (JPEG): images [rows, 3, 32, 32], normalised by channel; classes by name in alphabetical order."""
    from PIL import Image

    found: dict[str, list[tuple[str, Tensor]]] = {"train": [], "test": []}
    with tarfile.open(find_data() / "cifar10" / "CIFAR-10-images.tar.gz") as archive:
        for member in archive:
            if not member.name.endswith(".jpg"):
                continue
            split, name, _ = Path(member.name).parts[-3:]
            file = archive.extractfile(member)
            assert file is not None
            pixels = bytearray(Image.open(io.BytesIO(file.read())).convert("RGB").tobytes())
            found[split].append((name, torch.frombuffer(pixels, dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)))
    names = sorted({name for name, _ in found["train"]})
    made = []
    for rows in found.values():
        images = torch.stack([image for _, image in rows]).float().div_(255)
        made.append((images, torch.tensor([names.index(name) for name, _ in rows])))
    mean, deviation = made[0][0].mean((0, 2, 3), keepdim=True), made[0][0].std((0, 2, 3), keepdim=True)
    train, test = [((x - mean) / deviation, y) for x, y in made]
    return train, test


def load_sst2(length: int = 48) -> tuple[Split, Split, int]:
    """SST-2: WordPiece numbers [rows, length], 0 is padding; train and dev; and the size of the vocabulary."""
    vocabulary = {
        word: i for i, word in enumerate((find_data() / "bert-vocab" / "vocab.txt").read_text().split("\n")) if word
    }
    splits = []
    for split in ("train", "dev"):
        with open(find_data() / "glue" / "SST-2" / f"{split}.tsv") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        for i, row in enumerate(rows):
            pieces = [p for word in row["sentence"].strip().split() for p in split_word(word, vocabulary)][:length]
            tokens[i, : len(pieces)] = torch.tensor(pieces)
        splits.append((tokens, torch.tensor([int(row["label"]) for row in rows])))
    return splits[0], splits[1], len(vocabulary)


def split_word(word: str, vocabulary: dict[str, int]) -> list[int]:
    """Greedy, the longest piece first; unknown words become [UNK]."""
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = word[start:end] if start == 0 else f"##{word[start:end]}"
            if piece in vocabulary:
                pieces.append(vocabulary[piece])
                start = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return pieces
