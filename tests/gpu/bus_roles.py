"""What the processes of the GPU tests of publisher and subscriber do, beyond those of all end-to-end tests."""

from __future__ import annotations

import gc
from typing import Any

import torch

import busync
from busync import blocking
from tests.support import gpu, patterns
from tests.support.roles import PublisherRole, SubscriberRole, wait_until

SMALL = patterns.SMALL


def mixed_state(version: int) -> dict[str, torch.Tensor]:
    """A state on the CPU, and on each of two devices, with tied tensors."""
    host = {f"host.{name}": tensor.cpu() for name, tensor in patterns.state(1, version, SMALL).items()}
    first = {f"first.{name}": tensor.to("cuda:0") for name, tensor in patterns.state(2, version).items()}
    second = {f"second.{name}": tensor.to("cuda:1") for name, tensor in patterns.state(3, version).items()}
    return {**host, **first, **second, "tied": second["second.conv"], "part": first["first.body.weight"][3:5]}


class Learner(PublisherRole):
    """A publisher on a GPU."""

    def publish_to_all(self, timeout: float = 10.0) -> tuple[tuple[str, ...], dict[str, str]]:
        """Publish and wait for everybody: who has acknowledged, and who failed and why."""
        self.version += 1
        state = patterns.state(self.seed, self.version)
        report = self.pub.publish(state, label=str(self.seed), wait="all", timeout=timeout)
        return report.acked, report.failed

    def wait_acked(self, version: int) -> tuple[str, ...]:
        """Who is missing."""
        try:
            self.pub.wait(version, timeout=1)
        except busync.WaitTimeout as error:
            return error.missing
        return ()

    def publish_many(self, count: int) -> None:
        """Small versions, each when everybody has had the one before."""
        for _ in range(count):
            self.version += 1
            state = patterns.state(self.seed, self.version, SMALL)
            report = self.pub.publish(state, label=str(self.seed), wait="all", timeout=10)
            assert not report.pending, f"version {self.version} was not adopted by {report.pending}"

    def publish_mixed(self) -> None:
        self.version += 1
        assert self.pub.publish(mixed_state(self.version)).version == self.version

    def lend(self) -> int:
        """Publish the next version from a loan."""
        self.version += 1
        with self.pub.loan(like=patterns.state(0, 0)) as loan:
            for name, tensor in patterns.state(self.seed, self.version).items():
                assert loan.tensors[name].device.type == "cuda"
                loan.tensors[name].copy_(tensor)
            return loan.publish(label=str(self.seed)).version or 0

    def close(self) -> None:
        self.pub.close()

    def exports(self) -> int:
        return int(self.pub.status()["exports"])

    def counter(self, name: str) -> int:
        return int(self.pub.status()["counters"].get(name, 0))

    def counted(self) -> int:
        """How many openings torch counts for what this process has exported."""
        return sum(map(sum, gpu.counts({self.pid()}).values()))

    def allocated(self) -> int:
        """Bytes on device 0, but for what there was before."""
        return gpu.allocated() - self._allocated

    def subscribe_here(self) -> tuple[bool, int]:
        """A subscriber in this process: whether it gets the publisher's own memory, and openings counted."""
        self.publish()
        with blocking.Subscriber(self.pub.endpoint.directory, name="here") as sub:
            snapshot = sub.next(timeout=5)
            patterns.check(snapshot.tensors, self.seed, self.version)
            server: Any = self.pub._server
            addresses = {
                memory.flat.data_ptr()
                for pooled in server.pool._segments.values()
                for memory in pooled.devices.values()
            }
            own = min(tensor.data_ptr() for tensor in snapshot.tensors.values() if tensor.numel()) in addresses
            seen = own, self.counted()
            del snapshot
        return seen

    def collect_in_a_child(self) -> int:
        return self._fork(lambda _: None, leave="collect")


class Reader(SubscriberRole):
    """A subscriber of weights on a GPU."""

    def open(self) -> None:
        """Open what the snapshot is in, and let go of it."""
        dict(self.snapshot.tensors)
        self.snapshot = None

    def follow(self, versions: int) -> int:
        """Adopt so many small versions, in place and loaded in turn; the last one."""
        module = patterns.Module(SMALL)
        version = 0
        for turn in range(versions):
            snapshot = self._run(self.sub.next(10))
            assert snapshot.version == version + 1 or turn == 0, f"version {snapshot.version} after {version}"
            version = snapshot.version
            if turn % 2:
                self._run(snapshot.load_into(module))
                patterns.check(module.state_dict(), int(snapshot.label), version, SMALL)
            else:
                patterns.check(snapshot.tensors, int(snapshot.label), version, SMALL)
                self._run(snapshot.ack())
            del snapshot
        return version

    def refused(self) -> str:
        """Ask for the snapshot's tensors, in vain."""
        try:
            self.snapshot.tensors  # noqa: B018
        except busync.AttachError as error:
            return str(error)
        return ""

    def wrong(self) -> list[int]:
        """The versions held that are not as published."""
        wrong = []
        for (seed, version), tensors in self.held.items():
            try:
                patterns.check(tensors, seed, version)
            except AssertionError:
                wrong.append(version)
        return wrong

    def keep_mixed(self) -> None:
        """Check and keep the parts of a mixed version."""
        tensors, version = dict(self.snapshot.tensors), self.snapshot.version
        expected = mixed_state(version)
        assert list(tensors) == list(expected)
        for name, wanted in expected.items():
            assert tensors[name].device == wanted.device, f"{name!r} is on {tensors[name].device}"
            assert torch.equal(tensors[name].cpu(), wanted.cpu()), name
        assert tensors["tied"].data_ptr() == tensors["second.conv"].data_ptr()
        assert tensors["part"].data_ptr() == tensors["first.body.weight"][3].data_ptr()
        self.held[1, version] = tensors

    def devices(self) -> set[str]:
        """Where what is held lies."""
        return {str(tensor.device) for tensors in self.held.values() for tensor in tensors.values()}

    def edited(self) -> tuple[bool, bool]:
        """Whether digests agree for the snapshot's version before and after an edit in place."""
        tensors = self.snapshot.tensors
        published = self._run(self.snapshot.digest(10))
        before = published == busync.content_digest(tensors)
        patterns.fill(tensors["conv"][1], -5)
        return before, published == busync.content_digest(tensors)

    def collect_in_a_child(self) -> int:
        return self._fork(lambda _: None, leave="collect")

    def lose(self) -> None:
        """Wait until the publisher's end has been noticed."""
        wait_until(lambda: not self.connected())

    def imports(self) -> int:
        """How many openings the emulator counts here."""
        gc.collect()
        return gpu.emulator_stat("imports")


class Relay(Reader):
    """Publishes again what it is given."""

    def __init__(self, flavour: str, endpoint: str, options: dict[str, Any], to: str) -> None:
        super().__init__(flavour, endpoint, options)
        self.pub = blocking.Publisher(to).__enter__()

    def relay(self) -> int:
        """Pass the next version on; how many were taken for what they are."""
        snapshot = self._run(self.sub.next(10))
        self.pub.publish(snapshot.tensors, label=snapshot.label)
        return int(self.pub.status()["counters"]["relayed"])

    def stop(self) -> None:
        self.pub.close()
        del self.pub
        super().stop()
