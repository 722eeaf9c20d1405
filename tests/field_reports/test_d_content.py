"""What arrives is what was published, all of it, and nothing else changes (B55, B58, B60, B63, B65, B67, B68, B69)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import busync
from busync import blocking
from busync.errors import MismatchError
from tests.field_reports.kit import bus, raised
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import wait_until

SMALL = patterns.SMALL
LAYOUT = "busync/handles/layout.py"
LOAD = "busync/handles/load.py"

MUTANTS = {
    "test_b55_any_stride_arrives_with_its_values": (
        Mutant(
            LAYOUT, "    dense = shares and stored == span\n", "    dense = True\n",
            "strided tensors are copied from their base pointer as they lie",
        ),
        Mutant(
            "busync/manifest.py", "        if step and length != 1:", "        if length != 1:",
            "an expanded tensor is stored in its virtual size",
        ),
    ),
    "test_b58_everything_is_written_or_an_error_names_what_is_not": (
        Mutant(
            LOAD, "            elif not live.has(target):", "            elif False:",
            "copies are written to, which nobody uses",
        ),
        Mutant(
            LOAD, 'problems.append(f"the module has no {name!r}{where}")', "pass",
            "what the module lacks is dropped silently",
        ),
    ),
    "test_b60_version_and_data_come_together_by_every_way": Mutant(
        "busync/protocol/publisher.py", "        topic.content = Content(values, now)",
        "        topic.content = topic.content or Content(values, now)",
        "what travels beside the tensors is that of another version",
    ),
    "test_b63_unchanged_content_is_visible": Mutant(
        "busync/protocol/publisher.py", "digest == topic.digested[1]", "False",
        "an exporter that ships the same bytes every time goes unnoticed",
    ),
    "test_b65_an_edit_in_place_reaches_nobody": (
        Mutant(
            "busync/handles/memory.py", "mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, mmap.mmap",
            "mmap.PROT_READ, mmap.MAP_SHARED, mmap.mmap",
            "an edit in place ends the process",
        ),
        Mutant(
            "busync/handles/pagemap.py", "return not any(_own_page(", "return True or any(_own_page(",
            "a mapping that was written to is used again",
        ),
        Mutant(
            "busync/handles/private.py", "lent._last = _Last(mapping, self, keep)",
            "lent._last = _Last(mapping, self, keep); self._kept.append(mapping)",
            "a mapping that tensors refer to is used again",
        ),
    ),
    "test_b67_the_target_is_found_at_the_moment_of_the_load": Mutant(
        LOAD, "for name, tensor in module.state_dict(keep_vars=True).items()",
        "for name, tensor in module.__dict__.setdefault('_known', module.state_dict(keep_vars=True)).items()",
        "tensors are looked up once and written to for ever",
    ),
    "test_b68_buffers_travel_and_the_rule_for_the_others_is_kept": Mutant(
        "busync/publisher.py", "source = source.state_dict(keep_vars=True)",
        "source = dict(source.named_parameters())",
        "only parameters are published",
    ),
    "test_b69_twenty_loads_change_values_and_nothing_else": Mutant(
        LOAD, "copy(target, source)", "target.set_(source)",
        "a load changes more than values",
    ),
}  # fmt: skip

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool]


def _views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def base(*shape: int) -> torch.Tensor:
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).mul_(37).remainder_(101)
        return numbers.to(torch.float32).to(dtype).view(shape)

    return {
        "transposed": base(31, 17).t(),
        "permuted": base(5, 7, 3).permute(2, 0, 1),
        "stepped": base(64)[::3],
        "stepped rows": base(20, 9)[1::2],
        "columns": base(20, 9)[:, 2:7],
        "stepped columns": base(20, 18)[:, 1::4],
        "channels last": base(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "an offset": base(100)[41:77].view(6, 6),
        "diagonal": base(9, 9).diagonal(),
        "windows": base(12).unfold(0, 4, 2),
        "expanded": base(1, 1000).expand(5000, 1000),
        "one for all": base(1).expand(100_000),
        "scalar of a vector": base(5)[3],
        "no rows": base(4, 3)[2:2],
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements row by row, as bytes: torch cannot compare 8-bit floats."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_b55_any_stride_arrives_with_its_values() -> None:
    """Whatever its strides, a tensor arrives with its values; one that repeats elements costs what it has."""
    with bus() as (pub, (sub,)):
        for version, dtype in enumerate(DTYPES, 1):
            views = _views(dtype)
            pub.publish(views)
            snapshot = sub.next(timeout=5)
            assert snapshot.version == version
            assert list(snapshot.tensors) == list(views)
            for name, view in views.items():
                got = snapshot.tensors[name]
                assert (got.dtype, got.shape) == (dtype, view.shape)
                if name == "expanded":
                    got, view = got[:3], view[:3]
                assert torch.equal(_bits(got), _bits(view)), f"{name}, {dtype}"
            assert snapshot.nbytes < 20_000 * views["stepped"].element_size()  # and not 5,000,000 elements
            assert snapshot.tensors["expanded"].stride() == (0, 1)
            assert snapshot.tensors["channels last"].is_contiguous(memory_format=torch.channels_last)
            assert snapshot.tensors["transposed"].stride() == views["transposed"].stride()
            del snapshot, got


class Layers(nn.Module):
    """100 tensors."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2) for _ in range(50)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def test_b58_everything_is_written_or_an_error_names_what_is_not() -> None:
    """After a load every tensor that the module uses has its value, and the digest says so; or an error names it."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p", digests=True) as sub:
        source, target = Layers(), Layers()
        with torch.no_grad():
            for number, parameter in enumerate(source.parameters()):
                parameter.fill_(number + 1)
        known = target.state_dict(keep_vars=True)
        target.layers[7] = copy.deepcopy(target.layers[7])  # whoever kept ``known`` would write to a stale object
        pub.publish(source)
        snapshot = sub.next(timeout=5)
        assert len(snapshot.manifest.tensors) == 100
        snapshot.load_into(target)
        assert snapshot.digest() == busync.content_digest(target.state_dict())
        assert not bool(known["layers.7.weight"].any())
        for number, parameter in enumerate(target.parameters()):
            assert bool((parameter == number + 1).all())

        def copies(module: nn.Module, state: dict[str, Any], *_: object) -> None:
            state["layers.3.bias"] = state["layers.3.bias"].clone()

        def aliases(module: nn.Module, state: dict[str, Any], *_: object) -> None:
            state.update({name: tensor.detach() for name, tensor in state.items()})

        hooked, lacking, detached = Layers(), Layers(), Layers()
        for module, hook in ((hooked, copies), (detached, aliases)):
            register: Any = module._register_state_dict_hook
            register(hook)
        del lacking.layers[49]
        for module, name in ((hooked, "layers.3.bias"), (lacking, "layers.49.bias")):
            error = raised(MismatchError, lambda module=module: sub.latest(timeout=5).load_into(module))  # type: ignore[misc]
            assert name in str(error)
            assert not any(bool(parameter.any()) for parameter in module.parameters())  # all or nothing
        sub.latest(timeout=5).load_into(detached)  # an alias is as good as the tensor
        assert busync.content_digest(detached.state_dict()) == busync.content_digest(source.state_dict())


def test_b60_version_and_data_come_together_by_every_way() -> None:
    """By whatever call a version is received: its number, label, values and tensors are those of one publish."""
    with blocking.Publisher("p", max_segments=6) as pub, blocking.Subscriber("p") as sub:
        published = 0

        def publish() -> None:
            nonlocal published
            published += 1
            pub.publish({"w": torch.full((9,), float(published)), "step": published}, label=f"v{published}")

        def polled() -> blocking.Snapshot:
            found: list[blocking.Snapshot] = []

            def poll() -> bool:
                snapshot = sub.poll()
                found.extend([snapshot] if snapshot is not None else [])
                return bool(found)

            wait_until(poll)
            return found[0]

        ways: list[Callable[[], blocking.Snapshot]] = [
            lambda: sub.next(timeout=5),
            lambda: sub.latest(timeout=5),
            lambda: sub.wait_version(published, timeout=5),
            lambda: next(iter(sub)),
            polled,
        ]
        for way in ways * 3:
            publish()
            with way() as snapshot:
                assert snapshot.version == published == sub.adopted == sub.version
                assert (snapshot.label, snapshot.values) == (f"v{published}", {"step": published})
                assert float(snapshot.tensors["w"].sum()) == 9 * published
            assert sub.lag == 0
        with pub.loan(like={"w": ("float32", (9,))}) as loan:
            loan.tensors["w"].fill_(published + 1)
            loan.publish(label="lent", values={"step": published + 1})
        with sub.next(timeout=5) as snapshot:
            assert (snapshot.version, snapshot.label) == (published + 1, "lent")
            assert snapshot.values == {"step": published + 1}
            assert float(snapshot.tensors["w"].sum()) == 9 * (published + 1)


def test_b63_unchanged_content_is_visible() -> None:
    """Where digests are on, versions with the bytes of the one before are counted, and any change is none."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p", digests=True, name="a") as sub:
        state = {f"t{i}": torch.full((5,), float(i)) for i in range(400)}

        def publish() -> tuple[bytes, int]:
            pub.publish(state)
            digest = sub.next(timeout=5).digest()
            assert digest == busync.content_digest(state)
            return digest, pub.status()["counters"].get("unchanged", 0)

        first, count = publish()
        assert count == 0
        for expected in (1, 2, 3):
            assert publish() == (first, expected)
        state["t123"] = state["t123"].clone()
        state["t123"][4] += 1
        changed, count = publish()
        assert changed != first
        assert count == 3
        state["t123"][4] -= 1  # back again: not what was before
        assert publish() == (first, 3)
        state = dict(reversed(state.items()))  # the order of names is no content
        assert publish() == (first, 4)
        state = {("u0" if name == "t0" else name): tensor for name, tensor in state.items()}  # a name is
        assert publish()[1] == 4


def test_b65_an_edit_in_place_reaches_nobody(cast: Cast) -> None:
    """Whoever edits a version in place, by tensor or by numpy, sees it alone; a fresh look shows the original."""
    editor, other = None, None
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        editor, other = (cast.subscriber("p", "blocking", name=name) for name in ("editor", "other"))
        pub.publish(patterns.state(5, 1), label="5")
        for reader in (editor, other):
            assert reader.call("next")[0] == 1
            reader.call("keep")
        editor.call("scribble")
        with pytest.raises(AssertionError, match="expected"):
            editor.call("check")
        assert other.call("check") == 1
        mine = sub.next(timeout=5)
        mine.tensors["body.weight"].mul_(2)
        mine.tensors["body.bias"].numpy()[:] = -1.0
        mine.tensors["scalar"].data.fill_(9)
        assert float(mine.tensors["body.bias"].sum()) == -1000
        fresh = sub.latest(timeout=5)  # of the same version, in the same process
        patterns.check(fresh.tensors, 5, 1)
        module = patterns.Module()
        fresh.load_into(module)
        patterns.check(module.state_dict(), 5, 1)
        assert editor.call("latest")[0] == 1
        editor.call("drop", newest=True)
        assert editor.call("latest")[0] == 1
        editor.call("keep")
        with blocking.Subscriber("p") as late:
            patterns.check(late.latest(timeout=5).tensors, 5, 1)
        del mine, fresh
        pub.publish(patterns.state(5, 2), label="5")
        with sub.next(timeout=5) as snapshot:
            patterns.check(snapshot.tensors, 5, 2)
        for reader in (editor, other):
            reader.stop()


def test_b67_the_target_is_found_at_the_moment_of_the_load() -> None:
    """A load writes to the tensors that the module has now, whatever was put in their place before."""

    def deep_copy(model: nn.Sequential) -> nn.Sequential:
        return copy.deepcopy(model)

    def another_dtype_and_back(model: nn.Sequential) -> nn.Sequential:
        return model.double().float()

    def another_layer(model: nn.Sequential) -> nn.Sequential:
        model[0] = nn.Linear(3, 3)
        return model

    def another_parameter(model: nn.Sequential) -> nn.Sequential:
        model[0].weight = nn.Parameter(torch.ones(3, 3))
        return model

    def other_memory(model: nn.Sequential) -> nn.Sequential:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    with bus() as (pub, (sub,)):
        model: nn.Sequential = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
        zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        changes = [deep_copy, another_dtype_and_back, another_layer, another_parameter, other_memory]
        for change in changes:
            pub.publish({name: torch.ones_like(tensor) for name, tensor in zeros.items()})
            sub.next(timeout=5).load_into(model)
            model = change(model)
            pub.publish(zeros)
            sub.next(timeout=5).load_into(model)
            assert not bool(model(torch.ones(2, 3)).any()), change.__name__
            assert not any(bool(tensor.any()) for tensor in model.state_dict().values()), change.__name__


def test_b68_buffers_travel_and_the_rule_for_the_others_is_kept() -> None:
    """A module is published with its buffers, but for those it keeps out of its state dict; these travel if named."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("mask", torch.zeros(4), persistent=False)
            self.register_buffer("scale", torch.zeros(()))

    source, target = Model(), Model()
    source.norm(torch.randn(64, 4) * 3 + 2)
    source.get_buffer("mask").fill_(1)
    source.get_buffer("scale").fill_(7)
    with bus() as (pub, (sub,)):
        pub.publish(source)
        snapshot = sub.next(timeout=5)
        names = {spec.name: spec.parameter for spec in snapshot.manifest.tensors}
        assert names == {
            "norm.weight": True, "norm.bias": True, "norm.running_mean": False, "norm.running_var": False,
            "norm.num_batches_tracked": False, "scale": False,
        }  # fmt: skip
        snapshot.load_into(target)
        for name in names:
            assert torch.equal(target.state_dict()[name], source.state_dict()[name]), name
        assert int(target.norm.num_batches_tracked or 0) == 1
        assert not bool(target.get_buffer("mask").any())
        pub.publish(dict(source.state_dict()) | {"mask": source.get_buffer("mask")})
        snapshot = sub.next(timeout=5)
        assert "mask" in snapshot.tensors
        error = raised(MismatchError, lambda: snapshot.load_into(target))  # a load goes by the state dict, too
        assert "'mask'" in str(error)
        target.get_buffer("mask").copy_(snapshot.tensors["mask"])
        snapshot.load_into(target, strict=False)
        assert bool(target.get_buffer("mask").all())


def test_b69_twenty_loads_change_values_and_nothing_else() -> None:
    """However often a version is loaded: the same names, objects, types, gradient flags, and optimizer."""
    with bus() as (pub, (sub,)):
        target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        target[2].weight = target[2].weight  # a tie
        target[0].bias.requires_grad_(False)
        with torch.no_grad():  # one that does not lie in memory as it is published
            target[0].weight.data = torch.zeros(3, 4).t()
        # What an optimizer has. A real one takes seconds to import.
        held = [parameter for parameter in target.parameters() if parameter.requires_grad]

        def shape() -> dict[str, tuple[Any, ...]]:
            return {
                name: (
                    id(tensor),
                    type(tensor),
                    tensor.requires_grad,
                    tensor.is_leaf,
                    tensor.data_ptr(),
                    tensor.stride(),
                )
                for name, tensor in target.state_dict(keep_vars=True).items()
            }

        before = shape()
        for version in range(1, 21):
            source = {name: torch.full_like(tensor, version) for name, tensor in target.state_dict().items()}
            source["0.weight"] = source["0.weight"].contiguous()
            pub.publish(source)
            sub.next(timeout=5).load_into(target)
            assert shape() == before
            for tensor in target.state_dict().values():
                assert bool((tensor == version).all())
        now = [parameter for parameter in target.parameters() if parameter.requires_grad]
        assert len(now) == len(held)
        assert all(one is other for one, other in zip(now, held, strict=True))
        target(torch.randn(8, 3)).square().sum().backward()
        with torch.no_grad():  # and it trains
            for parameter in held:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad + 0.5)
        assert not bool((target.get_parameter("2.weight") == 20).all())
        assert bool((target.get_parameter("0.bias") == 20).all())
