"""Publisher and subscriber between real processes on a GPU: what holds there alone, or differently than on the CPU.

What holds on both is tested by the end-to-end tests that are marked ``devices``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.bus_roles import Learner, Reader, Relay
from tests.support import gpu
from tests.support.devices import EMULATED, MARKS, two_devices
from tests.support.processes import DEVICE, Actor, Cast
from tests.support.roles import FLAVOURS, wait_until

pytestmark = MARKS
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States are on the GPU, and nothing is left there after the test."""
    monkeypatch.setenv(DEVICE, "cuda")
    with gpu.nothing_left(request):
        yield


def begin(cast: Cast, role: type, *args: object) -> Actor:
    actor = cast.begin(role, *args)
    actor.finish(60)
    return actor


def learner_of(cast: Cast, **options: object) -> Actor:
    return begin(cast, Learner, "policy", options)


def reader_of(cast: Cast, flavour: str = "asyncio", **options: object) -> Actor:
    return begin(cast, Reader, flavour, "policy", options)


def adopt(learner: Actor, *readers: Actor) -> int:
    """Publish a version, and have readers hold it in place alone."""
    version = int(learner.call("publish")["version"])
    for reader in readers:
        assert reader.call("next")[0] == version
        reader.call("keep")
        reader.call("drop")
    return version


def uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-").lower()


# Readers that end


@pytest.mark.parametrize("moment", ["before the import", "after the import", "while it reads"])
def test_a_killed_reader_costs_nothing_and_disturbs_nobody(cast: Cast, moment: str) -> None:
    learner = learner_of(cast, max_segments=3, lease_timeout=0.3)
    dead, living = reader_of(cast, "blocking", name="dead"), reader_of(cast, "uvloop", name="living")
    learner.call("publish")
    dead.call("next")
    if moment == "after the import":
        dead.call("open")
    elif moment == "while it reads":
        dead.call("keep")
        dead.start("run_for", 60.0, 1)
    assert living.call("next")[0] == 1
    living.call("keep")
    assert learner.call("exports") >= 1
    dead.kill()
    wait_until(lambda: learner.call("subscribers") == ["living"])
    for _ in range(6):
        assert adopt(learner, living) > 1
    assert living.call("check") == 1
    wait_until(lambda: learner.call("counter", "exports of dead readers") >= 1, what="the end of its exports")
    living.stop()
    wait_until(lambda: learner.call("exports") == 0, what="the end of every export")
    assert learner.call("counted") == 0
    learner.call("publish")


def test_readers_that_never_open_anything_cost_nothing(cast: Cast) -> None:
    learner = learner_of(cast)
    for flavour in FLAVOURS:
        reader = reader_of(cast, flavour, name="idle")
        for version in range(1, 6):
            learner.call("publish")
            assert reader.call("next")[0] % 5 == version % 5
            reader.call("release")
        assert reader.call("imports") == 0
        assert learner.call("exports") > 0
        reader.stop()
        wait_until(lambda: learner.call("exports") == 0)
    assert learner.call("counted") == 0
    assert learner.call("counter", "exports of dead readers") == 0


def test_memory_returns_when_the_layout_changes(cast: Cast) -> None:
    """Segments that are not written again are freed although the session of their reader goes on."""
    learner, reader = learner_of(cast, max_segments=2), reader_of(cast)
    for _ in range(3):
        adopt(learner, reader)
        reader.call("drop", newest=True)
    before = learner.call("allocated")
    reader.start("follow", 6)
    learner.call("publish_many", 6)
    reader.finish()
    wait_until(lambda: learner.call("allocated") < before // 8, what="the end of the large segments")
    assert learner.call("exports") == learner.call("counted") <= 2


def test_a_killed_publisher_is_replaced(cast: Cast) -> None:
    """Readers are told, let go of what they held, and adopt what the next publisher has."""
    learner = learner_of(cast)
    readers = [reader_of(cast, flavour, name=flavour) for flavour in FLAVOURS]
    adopt(learner, *readers)
    learner.kill()
    for reader in readers:
        reader.call("lose")
        if EMULATED:  # on a GPU the content is undefined from now on
            assert reader.call("wrong") == []
    learner = learner_of(cast)
    for reader in readers:
        wait_until(lambda reader=reader: bool(reader.call("connected")))  # type: ignore[misc]
    for _ in range(3):
        adopt(learner, *readers)
    for reader in readers:
        assert reader.call("check") == 1
        assert reader.call("imports") <= 4, "something of the dead publisher is open"
        reader.stop()  # before the publisher: what readers have open is not free before they close


def test_publishers_are_killed_while_readers_adopt(cast: Cast) -> None:
    readers = [reader_of_nobody(cast, flavour) for flavour in FLAVOURS]
    for _ in range(4):
        learner = learner_of(cast, max_segments=3, lease_timeout=0.3)
        for reader in readers:
            if reader._busy:
                reader.finish(60)  # it is attached
            wait_until(lambda reader=reader: bool(reader.call("connected")))  # type: ignore[misc]
        learner.call("publish_forever", 0.001)
        for reader in readers:
            for _ in range(5):
                reader.call("next")
                reader.call("keep")
                reader.call("drop")
        learner.kill()
        for reader in readers:
            reader.call("lose")
            reader.call("drop", newest=True)
            wait_until(lambda reader=reader: reader.call("imports") == 0, what="the end of its imports")  # type: ignore[misc]
    learner_of(cast)  # removes what the last one has left


def reader_of_nobody(cast: Cast, flavour: str) -> Actor:
    return cast.begin(Reader, flavour, "policy", {"connect_timeout": 60.0, "name": flavour})


# Where versions are


@two_devices
def test_a_version_on_the_cpu_and_on_two_devices(cast: Cast) -> None:
    learner, readers = learner_of(cast), [reader_of(cast, flavour) for flavour in FLAVOURS]
    for version in range(1, 8):
        learner.call("publish_mixed")
        for reader in readers:
            assert reader.call("next")[0] == version
            reader.call("keep_mixed")
            reader.call("drop")
    devices = learner.call("status")["topics"]["default"]["devices"]
    assert devices.keys() == {uuid(0), uuid(1)}


def test_a_subscriber_that_names_the_device_reads_in_place(cast: Cast) -> None:
    learner, reader = learner_of(cast), reader_of(cast, device="cuda:0")
    other = reader_of(cast, "blocking")
    adopt(learner, reader, other)
    assert reader.call("devices") == {"cuda:0"}
    reader.call("scribble")
    assert other.call("wrong") == [1], "it is not the same memory"


@two_devices
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_subscriber_on_another_device_gets_a_copy_there(cast: Cast, flavour: str) -> None:
    learner, reader = learner_of(cast), reader_of(cast, flavour, device="cuda:1", name="copier")
    other = reader_of(cast)
    for _ in range(3):
        version = adopt(learner, reader, other)
    assert reader.call("devices") == {"cuda:1"}
    reader.call("scribble")
    assert other.call("wrong") == []
    assert reader.call("wrong") == [version]
    reader.call("release")
    wait_until(lambda: leases(learner)["copier"] == [], what="the end of a lease that only a copy was made from")


def leases(learner: Actor) -> dict[str, list[int]]:
    return {s["name"]: s["leases"] for s in learner.call("status")["subscribers"]}


def test_a_subscriber_in_the_publishers_process_gets_the_original(cast: Cast) -> None:
    learner = learner_of(cast)
    for _ in range(3):
        assert learner.call("subscribe_here") == (True, 0)
    wait_until(lambda: learner.call("exports") == 0)


def test_a_relay_copies(cast: Cast) -> None:
    learner = learner_of(cast)
    relay = begin(cast, Relay, "blocking", "policy", {}, "relayed")
    last = begin(cast, Reader, "asyncio", "relayed", {})
    for version in range(1, 6):
        learner.call("publish")
        assert relay.call("relay") == version
        assert last.call("next")[0] == version
        last.call("keep")
        last.call("drop")
    learner.call("close")
    relay.call("lose")
    assert last.call("check") == 1


# Writing


def test_loans_are_written_on_the_gpu(cast: Cast) -> None:
    learner, readers = learner_of(cast), [reader_of(cast, flavour) for flavour in FLAVOURS]
    for version in range(1, 7):
        assert learner.call("lend") == version
        for reader in readers:
            assert reader.call("next")[0] == version
            reader.call("keep")
            reader.call("drop")
    assert [reader.call("check") for reader in readers] == [1, 1, 1]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_module_on_the_gpu_is_loaded(cast: Cast, flavour: str) -> None:
    learner, reader = learner_of(cast), reader_of(cast, flavour)
    for version in range(1, 7):
        learner.call("publish")
        assert reader.call("next")[0] == version
        assert reader.call("load") > 60_000
    assert learner.call("exports") <= 4


def test_an_edit_in_place_is_seen_by_everybody_and_a_digest_finds_it(cast: Cast) -> None:
    """There is no copy-on-write on a GPU. Who suspects an edit compares with the publisher's digest."""
    learner, other = learner_of(cast), reader_of(cast)
    suspect = reader_of(cast, "blocking", digests=True)
    adopt(learner, other)
    suspect.call("next")
    assert suspect.call("edited") == (True, False)
    assert other.call("wrong") == [1]
    other.call("drop", newest=True)
    suspect.call("release")
    for _ in range(4):  # the edit is in no later version
        adopt(learner, other, suspect)
    assert (other.call("wrong"), suspect.call("wrong")) == ([], [])


def test_nothing_grows_over_a_thousand_versions(cast: Cast) -> None:
    learner = learner_of(cast)
    readers = [reader_of(cast, flavour, name=flavour) for flavour in ("blocking", "uvloop")]
    figures = []
    for versions in (200, 800):
        for reader in readers:
            reader.start("follow", versions)
        learner.call("publish_many", versions, timeout=60)
        for reader in readers:
            reader.finish(60)
        wait_until(lambda: not any(leases(learner).values()))
        status = learner.call("status")
        figures.append(([actor.call("gpu") for actor in (learner, *readers)], status["exports"]))
        assert status["exports"] == learner.call("counted")
        assert status["topics"]["default"]["segments"] <= 4
    (before, exports), (after, more) = figures
    assert more <= 2 * 4
    for earlier, later in zip(before, after, strict=True):  # the pool may have grown to its bound since
        grown = {name: later[name] - earlier[name] for name in later if later[name] > earlier[name]}
        assert all(count <= 4 * 2 for name, count in grown.items() if name != "allocated"), grown
        assert grown.get("allocated", 0) <= 4 * 4096, grown
    assert exports <= more


# What stands in the way


@two_devices
def test_a_reader_that_does_not_see_the_device_is_named_with_it(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, seeing = learner_of(cast), reader_of(cast, name="seeing")
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        blind = reader_of(cast, "blocking", name="blind")
    for version in (1, 2):
        learner.start("publish_to_all")
        assert (seeing.call("next")[0], blind.call("next")[0]) == (version, version)
        seeing.call("keep")
        seeing.call("drop")
        seeing.call("ack")
        said = blind.call("refused")
        acked, failed = learner.finish()
        assert acked == ("seeing",)
        assert list(failed) == ["blind"]
        for text in (said, failed["blind"]):
            assert uuid(0) in text
            assert uuid(1) in text
            assert "CUDA_VISIBLE_DEVICES" in text
        (missing,) = learner.call("wait_acked", version)
        assert missing.startswith("blind ")
        assert uuid(0) in missing
    blind.stop()
    wait_until(lambda: learner.call("exports") <= 2)


REFUSED = """
import torch, busync
from busync import blocking
weights = {"w": torch.ones(2000).to("cuda")}
with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
    for _ in range(2):
        try:
            pub.publish(weights)
        except busync.DeviceError as error:
            print(error)
    assert sub.version == 0
    pub.publish({"w": torch.ones(2000)})
    assert sub.next(5).tensors["w"].sum() == 2000
    assert pub.status()["exports"] == 0
    print("published")
"""


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:False"),
    ],
)
def test_settings_that_refuse_a_gpu_leave_the_cpu_alone(name: str, value: str, remedy: str) -> None:
    if EMULATED and name == "PYTORCH_CUDA_ALLOC_CONF":
        pytest.skip("the emulator can allocate nothing in expandable segments")
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env={**os.environ, name: value}, capture_output=True, text=True, timeout=60,
        cwd=ROOT, check=False,
    )  # fmt: skip
    *refusals, last = done.stdout.splitlines()
    assert last == "published", done.stderr
    assert len(refusals) == 2
    assert all(remedy in refusal for refusal in refusals)


# Forks


@pytest.mark.parametrize("leave", ["idle", "collect"])
def test_a_forked_child_of_a_reader_disturbs_nobody(cast: Cast, leave: str) -> None:
    learner, reader = learner_of(cast), reader_of(cast, "blocking")
    adopt(learner, reader)
    reader.call("fork_idle" if leave == "idle" else "collect_in_a_child")
    for _ in range(4):
        adopt(learner, reader)
    assert reader.call("check") == 1
    reader.call("end_child")
    assert learner.call("exports") == learner.call("counted") > 0
    late = reader_of(cast)
    adopt(learner, reader, late)


@pytest.mark.parametrize("leave", ["idle", "collect"])
def test_a_forked_child_of_a_publisher_disturbs_nobody(cast: Cast, leave: str) -> None:
    learner, reader = learner_of(cast), reader_of(cast, "blocking")
    adopt(learner, reader)
    learner.call("fork_idle" if leave == "idle" else "collect_in_a_child")
    for _ in range(4):
        adopt(learner, reader)
    learner.call("end_child")
    assert learner.call("exports") == learner.call("counted") > 0
    late = reader_of(cast)
    adopt(learner, reader, late)


EXITING = """
import os, subprocess, sys, torch
from busync import blocking
weights = {"w": torch.arange(3000.0).to("cuda")}
read = '''
import sys, torch
from busync import blocking
with blocking.Subscriber("p") as sub:
    assert torch.equal(sub.next(5).tensors["w"].cpu(), torch.arange(3000.0))
    print("read", flush=True)
    sys.stdin.readline()
'''
with blocking.Publisher("p") as pub:
    pub.publish(weights)
    first = subprocess.Popen([sys.executable, "-c", read], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "read\\n"
    pid = os.fork()
    if pid == 0:
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
    print(pub.status()["exports"], flush=True)
    second = subprocess.run([sys.executable, "-c", read], input="\\n", capture_output=True, text=True)
    print(second.stdout, second.stderr[-300:], flush=True)
    first.communicate("\\n", timeout=20)
"""


def test_a_forked_child_of_a_publisher_that_exits_takes_nothing_along() -> None:
    """At its exit, torch removes the files of its counters: they are the parent's."""
    done = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.stdout.split() == ["1", "read"], done.stdout + done.stderr
