"""PPO, in plain torch: the clipped surrogate on batches that may be a few versions old."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from examples.cartpole.policy import Policy
from examples.cartpole.rollout import Batch

DISCOUNT = 0.99
TRACE = 0.9  #: the lambda of the advantages
CLIP = 0.2
EPOCHS = 8
MINIBATCH = 256
RATE = 1.5e-3
ENTROPY = 0.003
VALUE_WEIGHT = 0.5
GRADIENT_NORM = 0.5


class Learner:
    """A policy and what it takes to improve it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._optimizer = torch.optim.Adam(policy.parameters(), lr=RATE, eps=1e-5)

    def update(self, batches: Sequence[Batch], *, left: float) -> int:
        """Improve the policy with what the actors saw; ``left`` (1 to 0) scales the step. How many steps were used."""
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * max(left, 0.1)
        samples = [torch.cat(parts) for parts in zip(*(self._samples(batch) for batch in batches), strict=True)]
        count = len(samples[0])
        for _ in range(EPOCHS):
            for chosen in torch.randperm(count).split(MINIBATCH):
                self._step(*(sample[chosen] for sample in samples))
        return count

    def _samples(self, batch: Batch) -> tuple[Tensor, ...]:
        """The usable steps of a batch: observations, actions, their log probabilities, advantages, targets."""
        observations = torch.from_numpy(batch.observations)
        with torch.no_grad():
            values = self.policy.values(observations).numpy()
        advantages = np.zeros_like(batch.rewards)
        trace = np.zeros(batch.rewards.shape[1], np.float32)
        for step in reversed(range(len(advantages))):
            # An episode that was cut off goes on in the value of its last state; one that fell does not.
            ahead = DISCOUNT * values[step + 1] * ~batch.terminated[step]
            surprise = batch.rewards[step] + ahead - values[step]
            trace = advantages[step] = surprise + DISCOUNT * TRACE * trace * ~batch.done[step]
        arrays = (batch.observations[:-1], batch.actions, batch.log_probabilities, advantages, advantages + values[:-1])
        return tuple(torch.from_numpy(array[batch.valid]) for array in arrays)

    def _step(self, observations: Tensor, actions: Tensor, before: Tensor, advantages: Tensor, targets: Tensor) -> None:
        logs = self.policy.log_probabilities(observations)
        ratio = (logs.gather(1, actions.unsqueeze(1)).squeeze(1) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        loss = VALUE_WEIGHT * mse_loss(self.policy.values(observations), targets) - gain - ENTROPY * entropy
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), GRADIENT_NORM)
        self._optimizer.step()
