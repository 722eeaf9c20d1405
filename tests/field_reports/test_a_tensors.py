"""Shared CPU memory: which bytes of which tensors are shared."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn

import busync
from tests.field_reports.kit import bus, raised, scaled, shared_bytes
from tests.support.leaks import resources
from tests.support.mutants import Mutant

MUTANTS = {
    "test_b12_tensors_without_an_element_keep_their_shape": Mutant(
        "busync/handles/build.py",
        ".as_strided(spec.size, spec.stride)\n        flat = ",
        ".as_strided((0,), (1,))\n        flat = ",
        "a tensor without an element loses its shape",
    ),
    "test_b13_a_view_costs_and_shows_what_it_shows": (
        Mutant(
            "busync/handles/layout.py",
            "        if view.dense:\n",
            "        if True:\n",
            "views that overlap bring along what lies between their elements",
        ),
        Mutant(
            "busync/handles/layout.py",
            "    return first.stored * first.itemsize\n",
            "    return first.end - first.start\n",
            "a slice costs the extent of its base",
        ),
    ),
    "test_b14_tied_tensors_cost_once_and_stay_tied": Mutant(
        "busync/handles/layout.py",
        "        if view.start < end:\n",
        "        if False:\n",
        "every name has memory of its own",
    ),
    "test_b15_publishing_leaves_the_graph_alone_and_keeps_the_flags": (
        Mutant(
            "busync/handles/layout.py",
            "view.tensor.requires_grad, view.name in parameters,",
            "view.name in parameters, view.name in parameters,",
            "every parameter comes back as needing a gradient",
        ),
        Mutant(
            "busync/handles/planner.py",
            "        return flat, planned",
            "        [t.detach_() for t in flat.tensors.values() if not t._is_view()]\n        return flat, planned",
            "publishing cuts the source out of its graph",
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str)
def test_b12_tensors_without_an_element_keep_their_shape(dtype: torch.dtype) -> None:
    """Shape, stride and dtype survive, next to others, alone and as scalars; they cost neither bytes nor descriptor."""
    empty = {
        "a": torch.empty(0, dtype=dtype),
        "b": torch.empty(0, 3, dtype=dtype),
        "c": torch.empty(1, 0, dtype=dtype),
        "d": torch.empty(2, 0, 5, dtype=dtype).permute(2, 1, 0),
        "e": torch.ones(4, 4, dtype=dtype)[2:2],
    }
    scalar = torch.ones((), dtype=dtype)
    with bus() as (pub, (sub,)):
        pub.publish({"w": torch.ones(3)})
        sub.next(5)
        before = resources()
        for source in (empty, {**empty, "scalar": scalar}):
            pub.publish(source)
            snapshot = sub.next(5)
            assert list(snapshot.tensors) == list(source)
            for name, wanted in source.items():
                found = snapshot.tensors[name]
                assert (found.dtype, found.shape, found.stride()) == (dtype, wanted.shape, wanted.stride()), name
                assert torch.equal(found, wanted)
            assert snapshot.nbytes == (dtype.itemsize if "scalar" in source else 0)
            target = nn.Module()
            for name, wanted in source.items():
                target.register_buffer(name, torch.zeros_like(wanted))
            snapshot.load_into(target)
            del snapshot, found
            if "scalar" not in source:
                assert not resources().beyond(before)


def test_b13_a_view_costs_and_shows_what_it_shows() -> None:
    """Whatever is cut out of a large tensor: it costs what it shows, and no byte of its neighbours can be mapped."""
    marker = 171
    base = torch.full((scaled(32, 256) << 20,), marker, dtype=torch.uint8)
    table = base.view(-1, 1024)
    cuts = {
        "row": [table[5, 8:16]],
        "column": [table[:64, 3]],
        "block": [table[7:9, 100:200]],
        "steps": [base[1 << 20 : (1 << 20) + 4096 : 16]],
        "expanded": [base[77:78].expand(1 << 20)],
        "interleaved": [base[4096:8192:16], base[4104:8192:32]],
        "apart": [base[10:20], base[-20:-10]],
    }
    for how, views in cuts.items():
        for number, view in enumerate(views):
            view[(0,) * view.dim() if how == "expanded" else ...] = number + 1
        with bus() as (pub, (sub,)):
            before = shared_bytes()
            pub.publish({f"v{i}": view for i, view in enumerate(views)})
            assert shared_bytes() - before < 1 << 20, how
            snapshot = sub.next(5)
            shown = 1 if how == "expanded" else 4096 if how == "interleaved" else sum(view.numel() for view in views)
            assert snapshot.nbytes <= shown + 64 * len(views), how
            for number, view in enumerate(views):
                assert torch.equal(snapshot.tensors[f"v{number}"], view), how
            session = sub._inner._session
            assert session is not None
            (segment,) = session.segments.values()
            seen = bytes(segment.readonly())
            assert len(seen) == segment.nbytes
            assert seen.count(marker) == 0, f"{how}: a neighbour can be seen"
            del snapshot, session, segment
        base.fill_(marker)


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 64)
        self.head = nn.Linear(64, rows, bias=False)
        self.head.weight = self.embed.weight


def test_b14_tied_tensors_cost_once_and_stay_tied() -> None:
    """One storage under two names, in every version. A version with one of them has that one, and no stale twin."""
    rows = scaled(1 << 12, 1 << 18)
    model, reader = Tied(rows), Tied(rows)
    names = {"embed.weight", "head.weight"}
    nbytes = rows * 64 * 4
    with bus() as (pub, (sub,)):
        before = shared_bytes()
        for version in (1, 2):
            with torch.no_grad():
                model.embed.weight.fill_(version)
            pub.publish(model)
            snapshot = sub.next(5)
            tensors = snapshot.tensors
            assert set(tensors) == names
            assert snapshot.nbytes == nbytes
            assert len({tensor.data_ptr() for tensor in tensors.values()}) == 1
            assert all(bool((tensor == version).all()) for tensor in tensors.values())
            tensors["embed.weight"][0] = -1  # in place, under both names
            assert bool((tensors["head.weight"][0] == -1).all())
            del snapshot, tensors
            sub.latest(5).load_into(reader)
            assert reader.head.weight is reader.embed.weight
            assert bool((reader.head.weight == version).all())
        assert shared_bytes() - before <= 2 * nbytes + 8192
        pub.publish({"embed.weight": torch.full((rows, 64), 3.0)})
        snapshot = sub.next(5)
        assert set(snapshot.tensors) == {"embed.weight"}
        assert raised(busync.MismatchError, partial(snapshot.load_into, reader))
        assert bool((reader.head.weight == 2).all())
        snapshot.load_into(reader, strict=False)
        assert bool((reader.head.weight == 3).all())
        del snapshot


def test_b15_publishing_leaves_the_graph_alone_and_keeps_the_flags() -> None:
    """Parameters, results, hooks, integers: all are published detached, and gradients flow as if nothing had been."""
    weight = nn.Parameter(torch.full((100,), 2.0))
    steps = nn.Parameter(torch.arange(3), requires_grad=False)
    calls: list[torch.Tensor] = []
    hooked = torch.full((100,), 3.0, requires_grad=True)
    hooked.register_hook(calls.append)  # type: ignore[no-untyped-call]
    result = weight * hooked
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    source = {"weight": weight, "steps": steps, "hooked": hooked, "result": result, "frozen": frozen}
    with bus() as (pub, (sub,)):
        for version in (1, 2):
            assert pub.publish(source).version == version
        snapshot = sub.next(5)
        flags = {spec.name: (spec.requires_grad, spec.parameter) for spec in snapshot.manifest.tensors}
        assert flags == {
            "weight": (True, True),
            "steps": (False, True),
            "hooked": (True, False),
            "result": (True, False),
            "frozen": (False, True),
        }
        for name, wanted in source.items():
            found = snapshot.tensors[name]
            assert torch.equal(found, wanted.detach())
            assert (type(found), found.requires_grad, found.dtype) == (torch.Tensor, False, wanted.dtype)
        target = nn.Module()
        for name in ("weight", "steps", "frozen"):
            twin = nn.Parameter(torch.zeros_like(source[name]), requires_grad=source[name].requires_grad)
            target.register_parameter(name, twin)
        snapshot.load_into(
            target, strict=False, map=lambda name: name if name in ("weight", "steps", "frozen") else None
        )
        assert [p.requires_grad for p in target.parameters()] == [True, False, False]
        del snapshot, found
    assert not calls
    assert result.grad_fn is not None
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 1
    assert weight.grad is not None
    assert bool((weight.grad == 3).all())
    assert bool((hooked.grad == 2).all())  # type: ignore[union-attr]
    gc.collect()
