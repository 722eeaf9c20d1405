"""The plan for the same tensors again is the plan that would be made anew, and nothing else is taken for the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from busync.errors import ExportError
from busync.handles import Planner, TensorBuilder, flatten, plan
from busync.handles.layout import Plan, Views

Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    """A layout with tied and empty tensors, and one whose dimensions are in another order in memory."""
    tied = torch.randn(5, 3)
    return {
        "a": torch.randn(4), "tied": tied, "turned": torch.randn(6, 2).t(), "again": tied, "none": torch.empty(0, 3),
        "half": torch.randn(7).to(torch.bfloat16), "step": torch.tensor(3),
    }  # fmt: skip


def alike(planned: Plan, tensors: Tensors) -> bool:
    """Whether a plan is the one that is made anew, and brings every value there."""
    anew = plan(flatten(tensors))
    assert planned.manifest == anew.manifest
    assert planned.moves == anew.moves
    assert [copy.offset for copy in planned.copies] == [copy.offset for copy in anew.copies]
    memory = bytearray(planned.manifest.nbytes)
    for job in planned.jobs(memoryview(memory), 1):
        job()
    builder = TensorBuilder(memory, planned.manifest)
    for spec in planned.manifest.tensors:
        assert torch.equal(builder.build(spec), tensors[spec.name])
    return True


def test_the_same_tensors_are_planned_once() -> None:
    planner, tensors = Planner(), weights()
    first = planner.plan(tensors, {})[1]
    tensors["a"].fill_(7)
    again = planner.plan(tensors, {})[1]
    assert again.manifest is first.manifest
    assert again.moves is first.moves
    assert alike(again, tensors)


def test_the_same_tensors_somewhere_else_are_read_there() -> None:
    planner, tensors = Planner(), weights()
    first = planner.plan(tensors, {})[1]
    for name in ("a", "turned", "half"):
        tensors[name].data = tensors[name].clone()
    again = planner.plan(tensors, {})[1]
    assert again.manifest is first.manifest
    assert alike(again, tensors)
    assert planner.plan(tensors, {})[1].moves is again.moves


def _data(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def assign(tensors: Tensors) -> None:
        tensors[name].data = change(tensors[name])

    return assign


def _put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    def put(tensors: Tensors) -> None:
        tensors[name] = make(tensors)

    return put


def _reorder(tensors: Tensors) -> None:
    tensors["a"] = tensors.pop("a")


def _require(tensors: Tensors) -> None:
    tensors["a"].requires_grad_()


CHANGES: dict[str, Callable[[Tensors], object]] = {
    "another object": _put("a", lambda tensors: torch.randn(4)),
    "a parameter": _put("a", lambda tensors: torch.nn.Parameter(torch.randn(4), requires_grad=False)),
    "more tensors": _put("b", lambda tensors: torch.randn(2)),
    "fewer tensors": lambda tensors: tensors.pop("half"),
    "another order": _reorder,
    "a gradient": _require,
    "another dtype": _data("a", lambda tensor: tensor.double()),
    "another size": _data("a", lambda tensor: torch.randn(5)),
    "another stride": _data("tied", lambda tensor: torch.randn(3, 5).t()),
    "no longer tied": _data("again", lambda tensor: tensor.clone()),
    "a slice": _data("a", lambda tensor: torch.randn(8)[::2]),
    "an overlap": lambda tensors: _data("half", lambda _: tensors["a"].view(torch.bfloat16)[:7])(tensors),
    "tied by now": lambda tensors: _data("a", lambda _: tensors["tied"].view(-1)[:4])(tensors),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_has_changed_is_planned_anew(change: str) -> None:
    planner, tensors = Planner(), weights()
    planner.plan(tensors, {})[1]
    CHANGES[change](tensors)
    assert alike(planner.plan(tensors, {})[1], tensors)
    assert alike(planner.plan(tensors, {})[1], tensors)


def test_a_storage_that_was_cut_is_refused() -> None:
    planner, tensors = Planner(), weights()
    planner.plan(tensors, {})[1]
    tensors["a"].untyped_storage().resize_(4)
    for _ in range(2):
        with pytest.raises(ExportError, match="its storage has only"):
            planner.plan(tensors, {})[1]


@pytest.mark.parametrize("source", [{"w": torch.randn(8)[::2]}, {"w": torch.randn(4, dtype=torch.cfloat).conj()}])
def test_what_is_not_copied_as_it_lies_is_planned_each_time(source: Tensors) -> None:
    planner = Planner()
    for _ in range(3):
        assert alike(planner.plan(source, {})[1], source)


def test_a_planner_keeps_no_tensor_alive() -> None:
    planner, tensors = Planner(), weights()
    planner.plan(tensors, {})[1]
    gone = weakref.ref(tensors["a"])
    del tensors
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("workers", [1, 2])
def test_many_small_tensors_are_copied_in_batches(workers: int) -> None:
    """Into the same tensors over a segment each time, whatever else has moved or is too large for them."""
    planner, views = Planner(), Views()
    tensors = {f"t{i}": torch.randn(3, 5) for i in range(600)} | {"turned": torch.randn(50, 4).t()}
    tensors |= {"large": torch.randn(200, 300), "none": torch.empty(0), "tied": tensors["t7"]}
    memory = bytearray(planner.plan(tensors, {})[1].manifest.nbytes)
    for number in range(3):
        for tensor in tensors.values():
            tensor.add_(number)
        if number == 1:
            tensors["t3"].data = tensors["t3"].clone()
        planned = planner.plan(tensors, {})[1]
        assert planned.batched is not None
        for job in planned.jobs(memoryview(memory), workers, views):
            job()
        builder = TensorBuilder(memory, planned.manifest)
        for spec in planned.manifest.tensors:
            assert torch.equal(builder.build(spec), tensors[spec.name])


def test_a_tensor_without_memory_is_refused_when_it_was_fine_before() -> None:
    planner, tensors = Planner(), weights()
    planner.plan(tensors, {})
    tensors["a"].data = torch._efficientzerotensor(4)
    with pytest.raises(ExportError, match="zero tensor"):
        planner.plan(tensors, {})


def test_a_mapping_of_another_kind_is_asked_for_its_items() -> None:
    class Doubled(dict[str, torch.Tensor]):
        """Shows other tensors than it stores."""

        def items(self) -> Any:
            return [(name, tensor * 2) for name, tensor in super().items()]

    planner, tensors = Planner(), {"a": torch.ones(3)}
    planner.plan(tensors, {})
    planned = planner.plan(Doubled(tensors), {})[1]
    memory = bytearray(planned.manifest.nbytes)
    for job in planned.jobs(memoryview(memory), 1):
        job()
    assert torch.frombuffer(memory, dtype=torch.float32, count=3).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("source", [{"outer": weights()}, [*weights().items()], {**weights(), "plain": 3}])
def test_other_kinds_of_sources_are_planned_alike(source: Any) -> None:
    planner = Planner()
    first, again = planner.plan(source, {"more": 1}), planner.plan(source, {"more": 2})
    assert again[1].manifest == first[1].manifest
    assert again[0].values == {**first[0].values, "more": 2}
    with pytest.raises(ExportError, match="two entries"):
        planner.plan(weights(), {"a": 1})
