"""The network: two small towers, one that acts and one that values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

OBSERVATION = 4  #: numbers that describe the cart and its pole
ACTIONS = 2


def _tower(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(OBSERVATION, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Policy(nn.Module):
    """Logits of the two actions, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = _tower(ACTIONS, 0.01)
        self.critic = _tower(1, 1.0)

    def log_probabilities(self, observations: Tensor) -> Tensor:
        """``(..., 4)`` float32 to ``(..., 2)``."""
        return torch.log_softmax(self.actor(observations), -1)

    def values(self, observations: Tensor) -> Tensor:
        """``(..., 4)`` float32 to ``(...)``."""
        values: Tensor = self.critic(observations).squeeze(-1)
        return values
