"""``python -m examples.cartpole``: the command line."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import busync
from examples.cartpole.crew import ActorError
from examples.cartpole.picture import draw
from examples.cartpole.train import Options, Training

PICTURE = Path(__file__).resolve().parents[2] / "build" / "cartpole.png"


def parse() -> tuple[Options, Path]:
    """What the command line asks for, and where the picture goes."""
    parser = argparse.ArgumentParser(prog="python -m examples.cartpole", description=__doc__)
    parser.add_argument("--bus", choices=["busync", "queue"], default="busync", help="what carries the weights")
    parser.add_argument("--endpoint", default="cartpole", help="the publisher's name (default: %(default)s)")
    parser.add_argument("--actors", type=int, choices=range(1, 17), default=4, metavar="N", help="1 to 16 (default: 4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--goal", type=float, default=450.0, help="mean return over 20 episodes (default: 450)")
    parser.add_argument("--seconds", type=float, default=240.0, help="give up after so long (default: 240)")
    parser.add_argument("--keep-on", action="store_true", help="use all the time, also when the goal is reached")
    parser.add_argument("--chaos", action="store_true", help="kill an actor every 1.5 s; another one takes its place")
    parser.add_argument("--plot", type=Path, default=PICTURE, metavar="FILE", help="the picture (build/cartpole.png)")
    arguments = vars(parser.parse_args())
    plot: Path = arguments.pop("plot")
    return Options(**arguments), plot


def main() -> int:
    """Run; 0 if the goal was reached."""
    options, plot = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    training = Training(options)
    try:
        report = training.run()
    except KeyboardInterrupt:
        print("cartpole: stopped", file=sys.stderr)
        return 130
    except (ActorError, busync.BusyncError) as error:
        print(f"cartpole: {error}", file=sys.stderr)
        return 1
    title = f"CartPole over {options.bus}, {options.actors} actors, seed {options.seed}"
    draw(training.history, plot, title=title, goal=options.goal)
    print(json.dumps(report))
    return 0 if training.reached is not None else 1


if __name__ == "__main__":
    sys.exit(main())
