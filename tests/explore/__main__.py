"""Explore the core to its end: ``python -m tests.explore [--bound small|full] [--without GUARD|all]``."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterable

from busync.protocol.guards import GUARDS
from tests.explore.bounds import FULL, GUARD_WORLDS, NOT_REACHED, SMALL, Bound, with_other
from tests.explore.compare import views
from tests.explore.search import Result, explore, without


def say(text: str) -> None:
    """Print at once: a run takes minutes."""
    print(text, flush=True)  # noqa: T201


def show(result: Result) -> None:
    """One line, and the story if there is one."""
    end = "FAULT" if result.fault else "complete" if result.complete else "not complete"
    figures = f"{result.states:12,} states {result.transitions:12,} transitions  depth {result.depth:3}"
    say(f"{result.bound.name:30} {figures}  {result.seconds:7.1f} s  {end}")
    for i, step in enumerate(result.story):
        say(f"    {i + 1:3}  {step}" if not step.startswith("FAULT") else f"         {step}")


def explore_all(bounds: Iterable[Bound]) -> bool:
    """Explore worlds; says whether each was explored to its end without a fault."""
    results = []
    for bound in bounds:
        results.append(explore(bound, report=say))
        show(results[-1])
    states, transitions = sum(r.states for r in results), sum(r.transitions for r in results)
    seconds = sum(r.seconds for r in results)
    say(f"{len(results)} worlds: {states:,} states, {transitions:,} transitions, {seconds:.0f} s of processor time")
    say(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of memory at most")
    return all(result.complete and not result.fault for result in results)


def compare_all(bounds: Iterable[Bound]) -> bool:
    """Compare worlds of two readers with any other reader; says whether nothing is missing there."""
    fine = True
    for bound in bounds:
        if bound.other:
            continue
        two, other = views(bound), views(with_other(bound))
        missing = two.missing_in(other)
        ends = f"{len(two.ends):,} of {len(other.ends):,} ended sessions"
        say(f"{bound.name:30} {len(two.sessions):9,} of {len(other.sessions):9,} views, {ends}: {missing:,} missing")
        fine = fine and not missing
    return fine


def switch_off(name: str) -> bool:
    """Show what a guard is for; says whether that is as expected."""
    with without(name):
        if name in GUARD_WORLDS:
            result = explore(GUARD_WORLDS[name])
            say(f"without {name}: {len(result.story) - 1} steps to a fault")
            show(result)
            return bool(result.fault)
        say(f"without {name}: no fault expected, as {NOT_REACHED[name]}.")
        say("Its story is in tests/protocol/test_guards.py.")
        return explore_all(SMALL)


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--bound", choices=("small", "full"), help="which worlds to explore")
    parser.add_argument("--without", choices=(*GUARDS, "all"), help="switch a guard off and show a shortest fault")
    parser.add_argument("--compare", action="store_true", help="compare with any other reader, instead of exploring")
    parser.add_argument("--world", choices=[bound.name for bound in (*SMALL, *FULL)], help="explore one world only")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    fine = True
    do = compare_all if options.compare else explore_all
    if options.world:
        fine = do([bound for bound in (*SMALL, *FULL) if bound.name == options.world])
    elif options.bound or not options.without:
        fine = do((*SMALL, *FULL) if options.bound == "full" else SMALL)
    if options.without:
        names = GUARDS if options.without == "all" else [options.without]
        for name in names:
            fine = switch_off(name) and fine
    say(f"{'all as it should be' if fine else 'NOT AS IT SHOULD BE'}, {time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
