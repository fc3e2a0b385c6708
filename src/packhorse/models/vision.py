"""Convolutional nets: AlexNet, VGG16, ResNet50 and a U-Net. `width` scales all channels, 1.0 is the published size."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def _scale(channels: int, width: float) -> int:
    return max(4, round(channels * width))


class AlexNet(nn.Module):
    """Images [rows, 3, 224, 224] -> logits."""

    def __init__(self, classes: int = 1000, width: float = 1.0):
        super().__init__()
        a, b, c, d, e, hidden = (_scale(n, width) for n in (64, 192, 384, 256, 256, 4096))
        self.features = nn.Sequential(
            nn.Conv2d(3, a, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(e * 36, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(images)).flatten(1))


class VGG16(nn.Module):
    """Images [rows, 3, 224, 224] -> logits."""

    def __init__(self, classes: int = 1000, width: float = 1.0):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for group in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
            for size in group:
                layers += [nn.Conv2d(channels, _scale(size, width), 3, padding=1), nn.ReLU(inplace=True)]
                channels = _scale(size, width)
            layers.append(nn.MaxPool2d(2))
        hidden = _scale(4096, width)
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 49, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(images)).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a skip."""

    def __init__(self, channels: int, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.skip = nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return self.relu(y + self.skip(x))


class ResNet50(nn.Module):
    """Images [rows, 3, 224, 224] -> logits."""

    def __init__(self, classes: int = 1000, width: float = 1.0, depths: Sequence[int] = (3, 4, 6, 3)):
        super().__init__()
        channels = _scale(64, width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages = []
        for stage, depth in enumerate(depths):
            inner, outer = _scale(64 * 2**stage, width), _scale(256 * 2**stage, width)
            blocks = []
            for i in range(depth):
                blocks.append(Bottleneck(channels, inner, outer, 2 if stage and i == 0 else 1))
                channels = outer
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(images))).flatten(1))


class DoubleConv(nn.Sequential):
    def __init__(self, channels: int, out: int):
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Images [rows, 3, n, n] -> a class for every pixel [rows, classes, n, n]; n a multiple of 2**(levels - 1)."""

    def __init__(self, classes: int = 21, width: float = 1.0, levels: int = 5):
        super().__init__()
        sizes = [_scale(64 * 2**i, width) for i in range(levels)]
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(sizes[::-1], sizes[-2::-1], strict=False))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(DoubleConv(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(sizes[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)
