"""``python -m tests.faults``: rounds of faults until enough steps are done or the time is over."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
import time
from pathlib import Path

from tests.faults.report import Report, shmem_bytes
from tests.faults.schedule import STEPS_PER_ROUND, make_round
from tests.faults.stage import Stage
from tests.support.warm import warm_up

PR_SET_CHILD_SUBREAPER = 36
SLACK_BYTES = 1 << 20  #: shared memory that others may have taken meanwhile
PATIENCE = 20.0  #: seconds for shared memory to come back


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000, help="fault steps, at least")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most")
    parser.add_argument("--round", type=int, default=None, help="replay this round of the seed alone")
    parser.add_argument("--round-steps", type=int, default=STEPS_PER_ROUND, help="scheduled steps of a round")
    parser.add_argument("--keep-going", action="store_true", help="count failures, and go on")
    parser.add_argument("--report", type=Path, default=None, help="default build/faults-SEED.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of killed children come to us
    warm_up()
    report = Report([options.seed], shmem_before=shmem_bytes())
    begun = time.monotonic()
    number = options.round or 0
    try:
        while report.steps < options.steps and time.monotonic() - begun < options.minutes * 60:
            stage = Stage(make_round(options.seed, number, options.round_steps))
            try:
                stage.play()
            except Exception as error:
                text = "".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
                replay = f"--seed {options.seed} --round {number} --round-steps {options.round_steps}"
                _say(f"FAILED, replay with {replay}:\n{text}")
                report.failures.append(f"{replay}: {text}")
            report.totals.add(stage.totals)
            report.rounds += 1
            report.seconds = time.monotonic() - begun
            _say(f"seed {options.seed} round {number}: {report.steps} steps, {report.kills} kills")
            number += 1
            if options.round is not None or (report.failures and not options.keep_going):
                break
    except KeyboardInterrupt:
        report.failures.append("interrupted")
    stop_at = time.monotonic() + PATIENCE
    while (after := shmem_bytes()) > report.shmem_before + SLACK_BYTES and time.monotonic() < stop_at:
        time.sleep(0.1)
    report.shmem_after = after
    if after > report.shmem_before + SLACK_BYTES:
        report.failures.append(f"shared memory leaks: {after} bytes, and {report.shmem_before} before")
    report.write(options.report or Path(f"build/faults-{options.seed}.json"))
    _say(report.text())
    return 1 if report.failures else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
