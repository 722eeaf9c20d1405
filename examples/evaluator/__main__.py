"""``python -m examples.evaluator``: evaluate one version of ``examples.cartpole`` while it goes on training."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import fmean

import torch

import busync
from examples.cartpole.policy import Policy
from examples.cartpole.rollout import evaluate

EPISODES = 20  #: per round
PATIENCE = 60.0  #: seconds to wait for the publisher, or for a version


def score(policy: Policy, seconds: float) -> list[float]:
    """The returns of as many rounds of episodes as fit into ``seconds``, at least one."""
    torch.set_num_threads(1)
    returns: list[float] = []
    stop_at = time.monotonic() + seconds
    while not returns or time.monotonic() < stop_at:
        returns += evaluate(policy, episodes=EPISODES, seed=len(returns))
    return returns


async def run(endpoint: str, seconds: float) -> bool:
    """Evaluate the version that is the newest now, then the one that is the newest afterwards. Whether all was well."""
    policy = Policy()
    async with busync.Subscriber(endpoint, name="evaluator", connect_timeout=PATIENCE, digests=True) as sub:
        snapshot = await sub.latest(timeout=PATIENCE)
        policy.load_state_dict(snapshot.tensors, assign=True)  # in place
        await snapshot.ack()
        print(f"joined {endpoint} at version {snapshot.version}", flush=True)
        digest = busync.content_digest(policy.state_dict())
        copy = {name: weight.clone() for name, weight in policy.state_dict().items()}
        returns = await asyncio.to_thread(score, policy, seconds)
        print(f"version {snapshot.version}: mean return {fmean(returns):.0f} over {len(returns)} episodes", flush=True)

        newer = sub.version - snapshot.version
        same = all(torch.equal(weight, copy[name]) for name, weight in policy.state_dict().items())
        same = same and digest == busync.content_digest(policy.state_dict()) == await snapshot.digest()
        print(
            f"meanwhile {newer} newer versions were published; version {snapshot.version} "
            f"{'stayed the same, element by element' if same else 'HAS CHANGED'}: sha256 {digest.hex()[:16]} before, "
            f"{busync.content_digest(policy.state_dict()).hex()[:16]} after",
            flush=True,
        )
        snapshot = await sub.latest(timeout=PATIENCE)
        policy.load_state_dict(snapshot.tensors, assign=True)  # lets go of the old version
        returns = await asyncio.to_thread(score, policy, 0.0)
        print(f"version {snapshot.version}: mean return {fmean(returns):.0f} over {len(returns)} episodes", flush=True)
    return same and newer > 0


def main() -> int:
    """0 if the version stayed the same while newer ones were published."""
    parser = argparse.ArgumentParser(prog="python -m examples.evaluator", description=__doc__)
    parser.add_argument("--endpoint", default="cartpole", help="the publisher's name (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to evaluate (default: 10)")
    arguments = parser.parse_args()
    try:
        return 0 if asyncio.run(run(arguments.endpoint, arguments.seconds)) else 1
    except busync.BusyncError as error:
        print(f"evaluator: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
