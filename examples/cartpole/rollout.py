"""Playing: several games at once, in plain numpy and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from examples.cartpole.policy import OBSERVATION, Policy

EPISODE_STEPS = 500  #: after so many steps an episode of CartPole-v1 is cut off, so 500 is the best return there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What an actor saw: T steps in E environments, made with one version of the weights."""

    version: int
    observations: NDArray[np.float32]  #: (T + 1, E, 4); the last row is what the last step led to
    actions: NDArray[np.int64]  #: (T, E)
    log_probabilities: NDArray[np.float32]  #: (T, E), of the actions under the version that chose them
    rewards: NDArray[np.float32]  #: (T, E)
    terminated: NDArray[np.bool_]  #: (T, E): the pole fell
    done: NDArray[np.bool_]  #: (T, E): the episode is over, because the pole fell or the time was up
    valid: NDArray[np.bool_]  #: (T, E): False where an environment only started anew and the action did nothing
    returns: list[float]  #: of the episodes that ended, in the order in which they did


def make_environments(count: int) -> Any:
    """``count`` games of CartPole-v1 in one object, stepped together in numpy."""
    return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")


class Player:
    """Plays ``environments`` games on and on, and tells about each stretch of ``steps`` steps."""

    def __init__(self, *, environments: int, steps: int, seed: int) -> None:
        self._games = make_environments(environments)
        self._shape = (steps, environments)
        self._random = torch.Generator().manual_seed(seed)
        self._observation, _ = self._games.reset(seed=seed)
        self._was_done = np.zeros(environments, np.bool_)
        self._return = np.zeros(environments)

    @torch.no_grad()
    def play(self, policy: Policy, version: int) -> Batch:
        """The next stretch, played with ``policy``, which is at ``version``."""
        steps, environments = self._shape
        batch = Batch(
            version=version,
            observations=np.empty((steps + 1, environments, OBSERVATION), np.float32),
            actions=np.empty(self._shape, np.int64),
            log_probabilities=np.empty(self._shape, np.float32),
            rewards=np.empty(self._shape, np.float32),
            terminated=np.empty(self._shape, np.bool_),
            done=np.empty(self._shape, np.bool_),
            valid=np.empty(self._shape, np.bool_),
            returns=[],
        )
        for step in range(steps):
            log_probabilities = policy.log_probabilities(torch.from_numpy(self._observation))
            chosen = torch.multinomial(log_probabilities.exp(), 1, generator=self._random)
            batch.observations[step] = self._observation
            batch.actions[step] = chosen.squeeze(1).numpy()
            batch.log_probabilities[step] = log_probabilities.gather(1, chosen).squeeze(1).numpy()
            batch.valid[step] = ~self._was_done
            self._observation, reward, terminated, truncated, _ = self._games.step(batch.actions[step])
            batch.rewards[step], batch.terminated[step] = reward, terminated
            self._was_done = batch.done[step] = terminated | truncated
            self._return += reward
            batch.returns.extend(self._return[self._was_done].tolist())
            self._return[self._was_done] = 0
        batch.observations[steps] = self._observation
        return batch


@torch.no_grad()
def evaluate(policy: Policy, *, episodes: int, seed: int) -> list[float]:
    """The returns of ``episodes`` fresh episodes, always taking the likelier action."""
    games = make_environments(episodes)
    observation, _ = games.reset(seed=seed)
    returns, playing = np.zeros(episodes), np.ones(episodes, np.bool_)
    while playing.any():
        actions = policy.log_probabilities(torch.from_numpy(observation)).argmax(-1)
        observation, reward, terminated, truncated, _ = games.step(actions.numpy())
        returns += reward * playing
        playing &= ~(terminated | truncated)
    return [float(value) for value in returns]
