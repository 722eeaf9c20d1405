"""Fits a line to points, and publishes the weights after every step."""

import sys
import time

import torch

from busync.blocking import Publisher

STEPS = 50


def main(actors: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04)
    inputs = torch.randn(256, 2)
    targets = inputs @ torch.tensor([[2.0], [-3.0]]) + 0.5

    with Publisher("quickstart") as pub:
        pub.publish(model, label="untrained", values={"last": False}, wait=actors, timeout=60)
        for step in range(1, STEPS + 1):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report = pub.publish(model, label=f"step {step}", values={"last": step == STEPS})
            if step % 10 == 0:
                print(f"version {report.version}: loss {loss.item():.4f}", flush=True)
            time.sleep(0.05)  # a step of yours takes longer
        pub.wait(STEPS + 1, "acked", timeout=10)  # whoever is there has the last one


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
