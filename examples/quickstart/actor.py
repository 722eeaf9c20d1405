"""Uses the learner's weights: the newest first, then each time newer ones. Start as many as you like, at any time."""

import torch

from busync.blocking import Subscriber


def main() -> None:
    model = torch.nn.Linear(2, 1)
    point = torch.tensor([1.0, 1.0])  # the line that the learner has to find is -0.5 there
    with Subscriber("quickstart", connect_timeout=60) as sub:
        for snapshot in sub:
            snapshot.load_into(model)
            print(f"version {snapshot.version} ({snapshot.label}): {model(point).item():.3f}", flush=True)
            if snapshot.values["last"]:
                break


if __name__ == "__main__":
    main()
