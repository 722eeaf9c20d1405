"""An actor's process: play with the newest weights, hand in what was seen, again and again."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from examples.cartpole.policy import Policy
from examples.cartpole.rollout import Batch, Player
from examples.cartpole.weights import Adopted, Inlet


@dataclass(frozen=True, slots=True)
class Delivery:
    """What an actor hands in at a time."""

    batch: Batch
    adopted: Adopted | None  #: the version that was loaded before this batch; None if there was no newer one
    cpu_seconds: float  #: that this process has used so far


def act(learner: Connection, inlet: Inlet, environments: int, steps: int, seed: int) -> None:
    """Run until the learner hangs up. A delivery is answered when it is taken, so at most one is on its way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which then hangs up
    torch.set_num_threads(1)
    policy = Policy()
    player = Player(environments=environments, steps=steps, seed=seed)
    version = 0
    try:
        with inlet:
            while True:
                adopted = inlet.adopt(policy)
                version = adopted.version if adopted is not None else version
                learner.send(Delivery(player.play(policy, version), adopted, time.process_time()))
                learner.recv()
    except Exception:
        if not learner.poll():  # it has not hung up, so this was not its way of saying that it is done
            raise
