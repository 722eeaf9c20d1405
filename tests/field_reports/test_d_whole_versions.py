"""A version is whole when it is announced, and making it changes nothing of the source (B76, B77, B78)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import busync
from busync import blocking
from busync.handles import Plan
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import SubscriberRole

LONG = bool(os.environ.get("BUSYNC_LONG"))
PUBLISHING = "busync/publishing.py"

MUTANTS = {
    "test_b76_a_swap_is_atomic_for_readers": (
        Mutant(
            "busync/protocol/guards.py", "return not entry.leases", "return True",
            "a segment is written again under its readers",
        ),
        Mutant(
            PUBLISHING,
            "    cancelled = await finish(asyncio.gather(*futures, return_exceptions=True))\n"
            "    for future in futures:\n        future.result()\n",
            "    cancelled = False\n",
            "a version is announced while it is being copied",
        ),
    ),
    "test_b77_a_version_is_announced_after_every_copy": (
        Mutant(
            PUBLISHING,
            "    cancelled = await finish(asyncio.gather(*futures, return_exceptions=True))\n"
            "    for future in futures:\n        future.result()\n",
            "    cancelled = False\n",
            "a version is announced while workers still copy it",
        ),
        Mutant(
            PUBLISHING, "            await _copy(server, planned, await _memory(server, reserved), queued)\n",
            "            server.loop.create_task(_copy(server, planned, await _memory(server, reserved), queued))\n",
            "a version is announced before its copy has begun",
        ),
    ),
    "test_b78_publishing_leaves_the_source_as_it_was": (
        Mutant(
            "busync/handles/layout.py", "source = view.tensor.detach()", "source = view.tensor.requires_grad_(False)",
            "parameters lose their flag by being published",
        ),
        Mutant(
            "busync/handles/planner.py", "        planned = _again(last, flat) if",
            "        [t.share_memory_() for t in flat.tensors.values()]\n        planned = _again(last, flat) if",
            "the source's own storage is moved to shared memory",
        ),
    ),
}  # fmt: skip


# B76: readers run while weights change


def uniform(tensors: Mapping[str, torch.Tensor]) -> int:
    """The value that every element of every tensor has.

    Raises:
        AssertionError: they have several.
    """
    low, high = torch.aminmax(torch.cat([tensors[name] for name in tensors]))
    assert low == high, f"a mixed version: {low} and {high}"
    return int(low)


class Uniform(SubscriberRole):
    """Adopts version after version while a second thread reads whatever is current, over and over."""

    def watch(self, last: int) -> tuple[int, int, float]:
        """Until version ``last``: versions adopted, looks at one, and the median CPU seconds of a swap."""
        current: dict[str, torch.Tensor] = {}
        over = threading.Event()
        looks, wrong = [0], []

        def read() -> None:
            seen = 0
            try:
                while not over.is_set():
                    if tensors := current:
                        value = uniform(tensors)
                        assert value >= seen, f"{value} after {seen}"
                        seen = value
                        looks[0] += 1
            except AssertionError as error:
                wrong.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        swaps: list[float] = []
        version = 0
        try:
            while version < last and not wrong:
                version = self.next()[0]
                begun = time.thread_time()
                current = dict(self.snapshot.tensors)
                swaps.append(time.thread_time() - begun)
                self.snapshot = None
                assert uniform(current) == version
        finally:
            over.set()
            reader.join()
        if wrong:
            raise wrong[0]
        return len(swaps), looks[0], sorted(swaps)[len(swaps) // 2]


def test_b76_a_swap_is_atomic_for_readers(cast: Cast) -> None:
    """Whoever reads while versions are published and adopted sees one version, all of it; a swap takes under 5 ms."""
    versions, count = (300, 4) if LONG else (150, 2)
    readers = [cast.begin(Uniform, flavour, "policy", {}) for flavour in ("asyncio", "uvloop", "blocking")[:count]]
    with blocking.Publisher("policy", max_segments=8, max_held=6) as pub:
        for reader in readers:
            reader.finish()
            reader.start("watch", versions)
        for version in range(1, versions + 1):
            pub.publish({f"t{i}": torch.full((2000,), float(version)) for i in range(200)})
        for reader in readers:
            adopted, looks, swap = reader.finish()
            assert adopted > 5
            assert looks > 5
            assert swap < 0.005


# B77: announced too early


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have every copy into a segment begin late, wherever it runs."""
    original = Plan.jobs

    def install(delay: float) -> None:
        def jobs(self: Plan, *arguments: Any) -> list[Callable[[], None]]:
            def late(job: Callable[[], None]) -> Callable[[], None]:
                def run() -> None:
                    time.sleep(delay)
                    job()

                return run

            return [late(job) for job in original(self, *arguments)]

        monkeypatch.setattr(Plan, "jobs", jobs)

    return install


@pytest.mark.parametrize("size", [3, 200], ids=["inline", "on workers"])
def test_b77_a_version_is_announced_after_every_copy(late_copies: Callable[[float], None], size: int) -> None:
    """However late a copy ends, no version is seen before it; its content digest is that of the source."""
    late_copies(0.02)
    with blocking.Publisher("policy") as pub, blocking.Subscriber("policy", digests=True) as sub:
        for version in range(1, 101 if LONG else 41):
            source = {f"t{i}": torch.full((size,), float(version)) for i in range(500)}
            pub.publish(source)
            assert sub.version == version
            snapshot = sub.next(timeout=5)
            assert uniform(snapshot.tensors) == version
            if version % 10 == 0:
                assert snapshot.digest(5) == busync.content_digest(source)


# B78: the source changes


class Odd(nn.Module):
    """A trained module with everything that a source can have: tied, sliced, expanded, frozen, shared, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(16)
        self.rows = nn.Parameter(torch.randn(16, 40)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(300, 300), requires_grad=False)
        self.register_buffer("expanded", torch.ones(1).expand(100))
        self.register_buffer("turned", torch.randn(3, 4).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens))) + self.rows.sum()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(20)).logsumexp(-1).mean().backward()
    optimizer.step()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for index, state in enumerate(optimizer.state.values()):
        yield from ((f"optimizer.{index}.{name}", t) for name, t in state.items() if isinstance(t, torch.Tensor))
    yield from ((f"{name}.grad", p.grad) for name, p in model.named_parameters() if p.grad is not None)


def hash_of(tensor: torch.Tensor) -> int:
    return hash(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a publish could change."""
    found: dict[str, Any] = {
        name: (
            id(t), t.data_ptr(), t._version, t.untyped_storage().is_shared(), t.requires_grad,
            t.is_leaf, t.grad_fn, tuple(t.shape),
            t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), hash_of(t),
        )
        for name, t in tensors_of(model, optimizer)
    }  # fmt: skip
    found["modes"] = [module.training for module in model.modules()], list(model.state_dict())
    found["process"] = (
        torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    )  # fmt: skip
    return found


def test_b78_publishing_leaves_the_source_as_it_was() -> None:
    """Neither values, addresses, sharing, flags nor versions of the trainer's tensors change, and training goes on."""
    torch.manual_seed(3)
    model = Odd()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer)
    sources: list[Callable[[], Any]] = [
        lambda: model, lambda: model.state_dict(), lambda: dict(model.named_parameters()), model.named_parameters,
        lambda: {"model": model, "optimizer": list(optimizer.state_dict()["state"].values()), "step": 1},
    ]  # fmt: skip
    with blocking.Publisher("policy") as pub, blocking.Subscriber("policy") as sub:
        for source in sources:
            for _ in range(2):
                before = facts(model, optimizer)
                pub.publish(source())
                for tensor in dict(sub.next(timeout=5).tensors).values():
                    if not tensor.is_complex() and tensor.numel() and 0 not in tensor.stride():
                        tensor.zero_()  # not even what readers do comes back
                assert facts(model, optimizer) == before
            train(model, optimizer)
        before = facts(model, optimizer)
        with pub.loan(like=model) as loan:
            loan.tensors["frozen"].zero_()
            with pytest.raises(busync.ExportError):
                pub.publish({"model": model, "bad": torch.eye(2).to_sparse()}, topic="other")
        assert facts(model, optimizer) == before
