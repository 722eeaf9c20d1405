from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from busync.errors import MismatchError
from busync.handles import NameMap, TensorBuilder, flatten, plan, plan_load
from tests.handles.kit import write
from tests.handles.test_tensors import Wrapper


def load(source: Any, *modules: nn.Module, strict: bool = True, names: NameMap | None = None) -> None:
    planned = plan(flatten(source))
    ready = plan_load(3, planned.manifest, modules, strict, names)
    ready.run(TensorBuilder(memoryview(write(planned)), planned.manifest))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_loaded(module: nn.Module, source: nn.Module) -> None:
    theirs = source.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, theirs[name])


def test_every_module_gets_the_whole_version() -> None:
    source, *targets = net(), net(), net()
    load(source, *targets)
    for target in targets:
        assert_loaded(target, source)


def test_what_a_hook_put_into_the_state_dict_is_no_target() -> None:
    def change(state: dict[str, Any], how: str) -> None:
        tensor = state["0.weight"]
        state["0.weight"] = {"copy": tensor.clone, "alias": tensor.detach, "view": lambda: tensor.view(4, 3)}[how]()

    for how in ("alias", "view", "copy"):
        target: Any = net()
        target._register_state_dict_hook(lambda module, state, *_, how=how: change(state, how))
        if how == "copy":
            with pytest.raises(MismatchError, match=r"'0\.weight' is a copy that state_dict\(\) made"):
                load(net(), target)
        else:
            source = net()
            load(source, target)
            assert torch.equal(target[0].weight, source.get_parameter("0.weight"))


def test_parameters_stay_the_same_objects() -> None:
    target = net()
    target[0].weight.requires_grad_(False)
    before = {name: (id(p), p.requires_grad, p.data_ptr()) for name, p in target.named_parameters()}
    load(net(), target)
    assert {name: (id(p), p.requires_grad, p.data_ptr()) for name, p in target.named_parameters()} == before


def test_autograd_notices() -> None:
    target = net()
    out = target(torch.randn(2, 3)).sum()
    load(net(), target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_strides_may_differ() -> None:
    values = torch.randn(4, 6)
    module = nn.Module()
    module.same = nn.Parameter(values.t().clone(memory_format=torch.preserve_format) * 0)
    module.turned = nn.Parameter(torch.zeros(6, 4))
    module.gaps = torch.zeros(6, 9)[:, 2:6]  # not yet in the state dict
    gaps = module.gaps
    del module.gaps
    module.register_buffer("gaps", gaps)
    load({"same": values.t(), "turned": values.t(), "gaps": values.t()}, module)
    for tensor in module.state_dict().values():
        assert torch.equal(tensor, values.t())


def test_all_kinds_of_tensors_are_loaded() -> None:
    module = nn.Module()
    source: dict[str, torch.Tensor] = {
        "scalar": torch.tensor(5), "empty": torch.empty(0, 3), "expanded": torch.randn(1, 3).expand(4, 3),
        "slice": torch.randn(5, 5)[:, 1:3], "long": torch.arange(9),
        "conj": torch.randn(2, dtype=torch.complex64).conj(),
    }  # fmt: skip
    for name, tensor in source.items():
        module.register_buffer(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
    load(source, module)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, source[name])


def test_tied_targets_are_filled() -> None:
    target, source = net(), net()
    for module in (target, source):
        module[1].bias = module[1].weight
    load(source, target)
    assert_loaded(target, source)


def test_inference_tensors_and_subclasses_can_be_targets() -> None:
    class Special(nn.Parameter):
        pass

    module = nn.Module()
    with torch.inference_mode():
        inference = torch.zeros(3)
        turned = torch.zeros(3, 2).t()
    module.register_buffer("inference", inference)
    module.register_buffer("turned", turned)
    module.special = Special(torch.zeros(3))
    source = {"inference": torch.ones(3), "turned": torch.ones(2, 3), "special": torch.ones(3)}
    load(source, module)
    assert all(bool((tensor == 1).all()) for tensor in module.state_dict().values())
    assert type(module.special) is Special


def test_large_tensors_of_other_strides_are_loaded_in_pieces() -> None:
    module = nn.Module()
    module.register_buffer("w", torch.zeros(700, 300))
    source = torch.randn(300, 700).t()
    load({"w": source}, module)
    assert torch.equal(module.state_dict()["w"], source)


def problems(source: Any, *modules: nn.Module, **options: Any) -> tuple[str, ...]:
    before = [{name: tensor.clone() for name, tensor in module.state_dict().items()} for module in modules]
    with pytest.raises(MismatchError) as caught:
        load(source, *modules, **options)
    for module, state in zip(modules, before, strict=True):
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, state[name])
    assert caught.value.version == 3
    return caught.value.problems


def test_every_problem_is_listed_and_nothing_is_written() -> None:
    source = net().state_dict()
    del source["2.bias"]
    source["0.bias"] = torch.ones(5)
    source["0.weight"] = torch.ones(4, 3, dtype=torch.float64)
    source["more"] = torch.ones(1)
    assert problems(source, net()) == (
        "'0.weight' is float32, and float64 was published",
        "'0.bias' has the shape [4], and [5] was published",
        "the module has no 'more'",
        "the version has no '2.bias'",
    )


def test_several_modules_are_told_apart() -> None:
    assert problems(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)) == (
        "the module has no 'bias' (module 1)",
    )


def test_without_strict_names_may_be_missing_but_shapes_must_fit() -> None:
    target = net()
    load({"0.bias": torch.ones(4), "more": torch.ones(1)}, target, strict=False)
    assert target.state_dict()["0.bias"].tolist() == [1, 1, 1, 1]
    assert problems({"0.bias": torch.ones(5)}, net(), strict=False) == (
        "'0.bias' has the shape [4], and [5] was published",
    )


@pytest.mark.parametrize(
    "names",
    [
        {"policy.weight": "weight", "policy.bias": "bias", "step": None},
        lambda name: name.removeprefix("policy.") if name != "step" else None,
    ],
)
def test_names_can_be_mapped(names: NameMap) -> None:
    target = nn.Linear(2, 2)
    source = {"policy": nn.Linear(2, 2), "step": torch.zeros(1)}
    load(source, target, names=names)
    assert_loaded(target, source["policy"])  # type: ignore[arg-type]


def test_two_tensors_cannot_have_one_target() -> None:
    source = {"weight": torch.ones(2, 2), "other": torch.ones(2, 2)}
    target = nn.Linear(2, 2, bias=False)
    assert problems(source, target, names={"other": "weight"}) == ("'weight' is the target of two tensors",)


def test_targets_that_cannot_be_written_to_are_found_first() -> None:
    module = nn.Module()
    sharded = torch.zeros(3)
    targets = {
        "fine": torch.zeros(3),
        "expanded": torch.zeros(1).expand(3),
        "meta": torch.zeros(3, device="meta"),
        "sharded": sharded,
        "sparse": torch.zeros(3).to_sparse(),
        "wrapper": Wrapper(torch.zeros(3)),
    }
    for name, tensor in targets.items():
        module.register_buffer(name, tensor)
    sharded.untyped_storage().resize_(0)
    with pytest.raises(MismatchError) as caught:
        load({name: torch.ones(3) for name in targets}, module)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "'expanded'",
        "'meta'",
        "'sharded'",
        "'sparse'",
        "'wrapper'",
    ]
    assert targets["fine"].tolist() == [0, 0, 0]


def test_extra_state_is_passed_over() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return 5

        def set_extra_state(self, state: object) -> None:
            raise AssertionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target, source = Extra(2, 2), Extra(2, 2)
        load(source, target)
    assert torch.equal(target.weight, source.weight)
