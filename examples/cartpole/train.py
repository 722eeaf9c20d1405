"""The learner: train on what the actors made, publish, look at the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch

from examples.cartpole.crew import Crew
from examples.cartpole.display import Screen
from examples.cartpole.history import EPISODES, History, middle, quantile
from examples.cartpole.policy import Policy
from examples.cartpole.ppo import Learner
from examples.cartpole.rollout import evaluate
from examples.cartpole.weights import BusyncOutlet, Outlet, QueueOutlet

ENVIRONMENTS = 8  #: per actor
STEPS = 32  #: per environment and batch
ANNEAL = 300  #: versions over which the learning rate falls
CHAOS = 1.5  #: seconds between a kill and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for."""

    bus: Literal["busync", "queue"]
    endpoint: str
    actors: int
    seed: int
    goal: float
    seconds: float
    keep_on: bool
    chaos: bool


class Training:
    """One run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.history = History()
        self.reached: float | None = None  #: seconds until the goal was reached
        self.mean_return = 0.0  #: of the last evaluation
        self._started_at = time.monotonic()
        self._next_kill_at = self._started_at + 2 * CHAOS
        self._learner: Learner
        self._outlet: Outlet
        self._crew: Crew
        self._screen: Screen

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_at

    def run(self) -> dict[str, Any]:
        """Train until the goal is reached, or until the time is up; what there is to tell about it."""
        options = self.options
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        self._learner = Learner(Policy())
        self._outlet = BusyncOutlet(options.endpoint) if options.bus == "busync" else QueueOutlet()
        crew = Crew(self._outlet, environments=ENVIRONMENTS, steps=STEPS, seed=options.seed)
        with Screen(options.bus) as self._screen, self._outlet, crew as self._crew:
            for _ in range(options.actors):
                crew.start()
            self._publish()
            while self.seconds < options.seconds and (self.reached is None or options.keep_on):
                self._improve()
                self._publish()
                self._judge()
                if options.chaos:
                    self._make_trouble()
        return self._report()

    def _improve(self) -> None:
        history = self.history
        taken, lost = self._crew.gather()
        lags = self._outlet.lags() or {}
        now = self.seconds
        for member, delivery in taken:
            age = history.version - delivery.batch.version
            history.ages.append(age)
            history.lags.setdefault(member.name, []).append((now, lags.get(member.name, age)))
            history.recent.extend(delivery.batch.returns)
            history.episodes += len(delivery.batch.returns)
            if delivery.adopted is not None and member.batches > 1:  # the first version was there before the actor
                history.latencies.append((now, delivery.adopted.latency))
        for member in lost:
            self._note(f"{member.name} is gone; {self._crew.start().name} takes its place")
        if taken:
            left = 1 - history.version / ANNEAL
            history.steps += self._learner.update([delivery.batch for _, delivery in taken], left=left)
        history.returns.append((now, history.mean_return))
        shown = {name: points[-1][1] for name, points in history.lags.items()}
        self._screen.show(history, self._crew.members.values(), shown)

    def _publish(self) -> None:
        before = time.monotonic()
        self.history.version = self._outlet.publish(self._learner.policy)
        self.history.calls.append(time.monotonic() - before)

    def _judge(self) -> None:
        """When the actors do well enough, see whether the version just published does so in fresh episodes."""
        if self.reached is not None or self.history.mean_return < self.options.goal:
            return
        self.mean_return = fmean(evaluate(self._learner.policy, episodes=EPISODES, seed=self.options.seed))
        if self.mean_return >= self.options.goal:
            self.reached = self.seconds
            self._note(
                f"version {self.history.version} has a mean return of {self.mean_return:.0f} over {EPISODES} fresh "
                f"episodes after {self.reached:.1f} s"
            )

    def _make_trouble(self) -> None:
        if self.seconds >= self._next_kill_at - self._started_at:
            self._next_kill_at = time.monotonic() + CHAOS
            self._note(f"{self._crew.kill().name} killed")

    def _note(self, text: str) -> None:
        self.history.events.append((self.seconds, text))
        self._screen.say(text)

    def _report(self) -> dict[str, Any]:
        history, options = self.history, self.options
        latencies = [seconds * 1000 for _, seconds in history.latencies]
        calls = [seconds * 1000 for seconds in history.calls]
        return {
            "seed": options.seed,
            "bus": options.bus,
            "actors": options.actors,
            "goal": options.goal,
            "seconds_to_goal": round(self.reached, 2) if self.reached is not None else None,
            "mean_return": round(self.mean_return, 1),
            "versions": history.version,
            "steps": history.steps,
            "episodes": history.episodes,
            "publish_latency_ms": {"median": round(middle(latencies), 2), "p95": round(quantile(latencies, 0.95), 2)},
            "publish_call_ms": {"median": round(middle(calls), 2), "p95": round(quantile(calls, 0.95), 2)},
            "lag": {"median": middle(history.ages), "max": max(history.ages, default=0)},
            "killed": self._crew.killed,
            "added": self._crew.started - options.actors,
            "seconds": round(self.seconds, 2),
            "cpu_seconds": {"learner": round(time.process_time(), 2), "actors": round(self._crew.cpu_seconds, 2)},
        }
