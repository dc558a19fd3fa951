"""The networks that `conf/model/` names; each maps images of 1 x 8 x 8 to ten classes."""

from torch import nn


def mlp(hidden: int) -> nn.Module:
    """Return a perceptron with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def cnn(channels: int) -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, 10),
    )
