"""The table of bounds says what the results say."""

from __future__ import annotations

from typing import Any

import pytest

from bench.extras import beside, memory, waits, where_time_went
from bench.targets import Target, targets
from bench.works import Results


def row(seconds: float, *, first: float = 1.0, failed: str = "") -> dict[str, Any]:
    return {"blocks": [[seconds] * 3] * 2, "first": first, "failed": failed, "took": 2.0}


def cell(name: str, processes: int = 0, busy: bool = False, **systems: dict[str, Any]) -> dict[str, Any]:
    mode, state, readers = name.split()
    about = {"mode": mode, "state": state, "readers": int(readers), "processes": processes, "busy": busy}
    return {**about, "systems": {key.replace("_", "-"): value for key, value in systems.items()}}


def found(text: str, *cells: dict[str, Any], **more: Any) -> Target:
    (target,) = (target for target in targets(Results.of({"cells": cells, **more})) if text in target.what)
    return target


def test_nothing_is_met_that_was_not_measured() -> None:
    assert {target.met for target in targets(Results())} == {None}


@pytest.mark.parametrize(("ours", "met"), [(1.44, True), (1.46, False)])
def test_the_limit_is_weighted_and_the_floor_is_not(ours: float, met: bool) -> None:
    work = cell("view gpt2 4", limit=row(1.0), floor=row(0.2), busync=row(ours))
    target = found("1.25 x limit", work)
    assert target.met is met
    assert target.measured == f"{ours / 1.45:.{3 if met else 2}f} (view gpt2 4)"


def test_the_worst_cell_counts() -> None:
    quick, slow = (cell(f"view lm {n}", limit=row(1.0), floor=row(0.0), busync=row(n)) for n in (1, 2))
    target = found("1.25 x limit", quick, slow)
    assert (target.measured, target.met) == ("1.60 (view lm 2, the worst of 2)", False)


def test_a_failure_misses_the_bound() -> None:
    work = cell("view many 4", limit=row(1.0), floor=row(0.2), busync=row(0.1, failed="no room"))
    target = found("5,000 tensors", work)
    assert (target.measured, target.met) == ("no figure (view many 4)", False)


def test_loans_are_compared_with_a_small_one_to_as_many() -> None:
    small, other = (cell(f"loan cartpole {n}", busync=row(n)) for n in (4, 16))
    large = cell("loan lm 4", busync=row(5.0))
    assert found("loan", small, other, large) == Target(
        "loan, 988 MB: busync over a loan of 20 KB to as many", "at most 1.5", "1.25 (loan lm 4)", True
    )
    assert found("loan", other, large).met is None


@pytest.mark.parametrize(("readers", "factor", "met"), [(16, 2.4, True), (16, 2.6, False), (64, 2.9, True)])
def test_small_states_are_compared_with_the_floor(readers: int, factor: float, met: bool) -> None:
    work = cell(f"view cartpole {readers}", floor=row(1.0), busync=row(factor))
    assert found(f"20 KB, {readers} readers", work).met is met


def test_peers_have_to_be_so_far_behind() -> None:
    work = cell("view gpt2 4", busync=row(1.0), queues=row(11.0), gloo=row(9.0), files=row(4.5), queues_reuse=row(0.5))
    assert found("queues over", work).met is True
    assert found("gloo over", work).met is False
    assert found("files over", work).met is True
    assert found("zmq over", work).met is None
    ahead = found("ahead of every peer", work)
    assert (ahead.met, ahead.measured) == (False, "in 0 of 1; behind at view gpt2 4")


def test_a_first_publish_is_compared_with_steady_queues() -> None:
    work = cell("view gpt2 4", busync=row(1.0, first=3.0), queues=row(4.0), queues_reuse=row(2.0))
    assert found("first publish", work).measured == "0.750 (view gpt2 4)"
    assert "| view gpt2 4 | 3,000 | 4,000 | 0.750 | 2,000 | 1.50 |" in "\n".join(beside(Results.of({"cells": [work]})))


def test_a_busy_machine_is_compared_with_an_idle_one() -> None:
    idle = cell("view gpt2 4", busync=row(1.0), gloo=row(2.0))
    busy = cell("view gpt2 4", busy=True, busync=row(2.5), gloo=row(3.0))
    assert found("busy machine", idle, busy).met is False
    assert found("busy machine", busy).met is None
    text = "\n".join(beside(Results.of({"cells": [idle, busy]})))
    assert "| **busync**, view gpt2 4 | 1,000 | 2,500 | 2.50 |" in text
    assert "| gloo, view gpt2 4 | 2,000 | 3,000 | 1.50 |" in text


@pytest.mark.parametrize(("many", "met"), [(20.0, True), (21.0, False)])
def test_a_connection_costs_what_it_costs_among_few(many: float, met: bool) -> None:
    works = [cell("view cartpole 64", 8, busync=row(1.0)), cell("view cartpole 1000", 8, busync=row(many))]
    assert found("cost per connection", *works).met is met
    assert found("cost per connection", works[1], cell("view cartpole 64", busync=row(1.0))).met is None
    assert "## A thousand connections" in beside(Results.of({"cells": works}))


def sizes(pss: float, **more: Any) -> dict[str, Any]:
    fields = {"kept": 1e9, "idle": 1e8, "learner": 1e6, "reader": 2e6, "dirty": 3e6, "tables": 4e6, "failed": ""}
    return {"pss": pss, **fields, **more}


@pytest.mark.parametrize(("pss", "met"), [(1.05e9, True), (1.06e9, False)])
def test_memory_has_a_bound_that_follows_from_the_pool(pss: float, met: bool) -> None:
    note = cell("memory gpt2 16", busync=sizes(pss), zmq={"failed": "left out"})
    assert found("memory", memory=[note]).met is met
    text = "\n".join(memory(Results.of({"memory": [note]})))
    assert f"| **busync** | {pss / 1e6:,.0f} | 1,000 | 1.00 | 2.00 | 3.00 | 4.00 |" in text
    assert "- zmq: left out" in text


def test_a_bound_of_memory_is_missed_by_a_failure() -> None:
    assert found("memory", memory=[cell("memory gpt2 16", busync={"failed": "no"})]).met is False


def late(p99: float) -> dict[str, Any]:
    return {"callbacks": 100, "p50": 0.001, "p99": p99, "max": 0.2}


def test_each_loop_has_a_bound_of_its_own() -> None:
    quiet = {"learner": late(0.001), "actor": late(0.001)}
    loops = {"failed": "", "versions": 9, "learner": late(0.019), "actor": late(0.021), "quiet": quiet}
    note = cell("loops lm 1", busync=loops)
    assert found("learner's loop", loops=[note]).met is True
    assert found("actor's loop", loops=[note]) == Target(
        "988 MB: callbacks on the actor's loop late by (p99)",
        "at most 20 ms",
        "21.0 ms, at most 200 (loops lm 1)",
        False,
    )
    assert "loops lm 1, actor, busync" in "\n".join(waits(Results.of({"loops": [note]})))
    failed = cell("loops lm 1", busync={"failed": "OSError: no"})
    assert found("actor's loop", loops=[failed]).met is False
    assert "OSError: no" in "\n".join(waits(Results.of({"loops": [failed]})))


def test_the_report_says_what_it_cost() -> None:
    works = [cell("view gpt2 4", busync=row(1.0), gloo=row(2.0) | {"took": 5.0})]
    assert "| view gpt2 4 | 7.0 | gloo 5.0, busync 2.0 |" in "\n".join(where_time_went(Results.of({"cells": works})))
