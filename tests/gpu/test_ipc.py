"""The CUDA handles between real processes: on a GPU, or on the emulated runtime of tests/cudaemu.

What passes on the emulator shows that memory is counted, kept and given back rightly. It shows nothing about order and
speed: see docs/GPU.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from busync.errors import AllocationError, AttachError
from tests.gpu import roles
from tests.gpu.roles import Bus, Exporter, Importer
from tests.support.devices import EMULATED, MARKS, two_devices
from tests.support.gpu import SHARED, counter_files, remove_counter_files
from tests.support.processes import STARTED, Actor, Cast

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
Make = Callable[..., Actor]


@pytest.fixture
def exporter(cast: Cast) -> Actor:
    return begin(cast, Exporter)


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    """No counter file of torch's is left."""
    yield
    assert counter_files(STARTED) == set()


@pytest.fixture
def spoiled(cast: Cast) -> Iterator[None]:
    """For tests that break the rules: their processes end without a word, and what they leave is removed."""
    yield
    for actor in cast._actors:
        actor._over = True
        actor.process.kill()
        actor.process.join()
        actor._pipe.close()
    remove_counter_files(STARTED)


def begin(cast: Cast, role: type, environment: dict[str, str] | None = None) -> Actor:
    actor = cast.begin(role, environment or {})
    actor.finish(60)
    return actor


def attach(exporter: Actor, importer: Actor, number: int, name: str = "actor") -> dict[str, Any]:
    """Send one segment to one reader."""
    sent: dict[str, Any] = exporter.call("export", number, importer.pid, name)
    importer.call("receive", number, sent)
    return sent


def finish(exporter: Actor, importers: list[Actor]) -> None:
    """Everybody closes; nothing is left."""
    for importer in importers:
        importer.call("close")
        assert importer.call("stats")["imports"] == 0, "an import is left"
    for number in (1, 2):
        exporter.call("drop", number)
    assert exporter.call("reap") == [], "a reader was taken for dead"
    assert exporter.call("outstanding") == [], "exports never ended"
    assert exporter.call("allocated") == 0, "memory was never given back"


def broadcast(exporter: Actor, importers: list[Actor], rounds: int = 4) -> None:
    """Two segments in turn, everybody in place, everything given back."""
    for number in (1, 2):
        exporter.call("create", number)
        exporter.call("write", number, 0)
    uuid = ""
    for version in range(1, rounds + 1):
        number = 1 + version % 2
        exporter.call("write", number, version)
        for position, importer in enumerate(importers):
            if version <= 2:
                uuid = attach(exporter, importer, number, f"actor-{position}")["device"]
            importer.call("take", number, version)
            assert importer.call("wrong", version) == [], "not what was published"
            assert importer.call("device", version) == uuid, "the label of another device"
            if version > 1:
                assert importer.call("wrong", version - 1) == [], "a version changed under its reader"
                assert version - 1 not in importer.call("released"), "released while its tensors were there"
                importer.call("let_go", version - 1)
    for importer in importers:
        importer.call("let_go", rounds)
    finish(exporter, importers)


@pytest.mark.parametrize("readers", [1, 3])
def test_every_element_of_every_version_reaches_every_reader(cast: Cast, exporter: Actor, readers: int) -> None:
    broadcast(exporter, [begin(cast, Importer) for _ in range(readers)])


def test_the_count_follows_the_import(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    sent = attach(exporter, importer, 1)
    assert exporter.call("count", sent) == 1
    importer.call("open", 1)
    importer.call("open", 1)
    assert exporter.call("count", sent) == 1
    exporter.call("drop", 1)
    assert exporter.call("allocated") > 0
    importer.call("close")
    assert exporter.call("count", sent) in (0, None)
    assert exporter.call("allocated") == 0


def test_a_publisher_that_has_closed_leaves_no_counters(cast: Cast, runtime_dir: Path) -> None:
    """Its process is a child of multiprocessing, which ends without a word to torch."""
    publisher, reader = begin(cast, Bus), begin(cast, Bus)
    publisher.call("serve", str(runtime_dir / "bus"))
    reader.call("follow", str(runtime_dir / "bus"))
    publisher.call("publish", 7.0)
    assert reader.call("value") == 7.0
    assert counter_files({publisher.pid})
    reader.call("end")
    publisher.call("settle")
    publisher.call("end")
    assert not counter_files({publisher.pid})


def test_a_view_keeps_a_version_and_the_import_outlives_it(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 5)
    sent = attach(exporter, importer, 1)
    importer.call("take", 1, 5)
    importer.call("keep_a_view", 5)
    assert importer.call("released") == []
    importer.call("let_go", 5)
    assert importer.call("released") == [5]
    assert exporter.call("count", sent) == 1
    importer.call("take", 1, 5)
    assert importer.call("wrong", 5) == []
    importer.call("let_go", 5)
    importer.call("close")
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


def test_what_is_held_outlives_session_and_segment(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 5)
    attach(exporter, importer, 1)
    importer.call("take", 1, 5)
    importer.call("close")
    exporter.call("drop", 1)
    exporter.call("occupy", roles.NBYTES, 9)
    assert importer.call("wrong", 5) == []
    importer.call("let_go", 5)
    exporter.call("reap")
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == roles.NBYTES


@pytest.mark.parametrize("moment", ["before the import", "after the import", "while it reads"])
def test_a_killed_reader_costs_nothing(cast: Cast, exporter: Actor, moment: str) -> None:
    dead, living = begin(cast, Importer), begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 3)
    sent = attach(exporter, dead, 1, "dead")
    attach(exporter, living, 1, "living")
    living.call("take", 1, 3)
    if moment == "after the import":
        dead.call("open", 1)
    elif moment == "while it reads":
        dead.call("take", 1, 3)
    dead.kill()
    exporter.call("drop", 1)
    assert exporter.call("count", sent) == 1
    assert exporter.call("reap") == ["dead"]
    assert exporter.call("outstanding") == ["living"]
    assert exporter.call("allocated") > 0
    assert living.call("wrong", 3) == []
    living.call("let_go", 3)
    living.call("close")
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == 0


def test_a_reader_that_never_imports_gives_back_when_it_closes(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    sent = attach(exporter, importer, 1)
    exporter.call("drop", 1)
    assert exporter.call("reap") == []
    assert exporter.call("count", sent) == 1
    assert exporter.call("allocated") > 0
    importer.call("close")
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == 0


def test_two_sessions_of_one_process_open_once(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 8)
    first, second = exporter.call("export", 1, importer.pid, "a"), exporter.call("export", 1, importer.pid, "b")
    importer.call("receive", "a", first)
    importer.call("receive", "b", second)
    importer.call("take", "a", 8)
    importer.call("open", "b")
    assert importer.call("stats")["imports"] == (1 if EMULATED else 0)
    assert [exporter.call("count", sent) for sent in (first, second)] == [1, 0]
    assert importer.call("wrong", 8) == []
    importer.call("let_go", 8)
    importer.call("close")
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


def test_a_subscriber_in_the_publishers_process_reads_the_original(exporter: Actor) -> None:
    exporter.call("create", 1)
    exporter.call("write", 1, 8)
    assert exporter.call("subscribe_here", 1, 8) == (True, True)
    exporter.call("drop", 1)
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == 0


def test_a_forked_child_of_a_reader_counts_nothing(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 2)
    sent = attach(exporter, importer, 1)
    importer.call("take", 1, 2)
    assert importer.call("drop_in_a_child") == 0
    assert exporter.call("count", sent) == 1
    assert importer.call("released") == []
    assert importer.call("wrong", 2) == []
    importer.call("let_go", 2)
    importer.call("close")
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


def test_a_killed_publisher_leaves_readers_alive(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 2)
    sent = attach(exporter, importer, 1)
    late = exporter.call("export", 1, importer.pid, "late")
    importer.call("take", 1, 2)
    exporter.kill()
    if EMULATED:  # on a GPU the content is undefined from now on
        assert importer.call("wrong", 2) == []
    importer.call("let_go", 2)
    importer.call("close")
    importer.call("receive", "late", late)
    with pytest.raises(AttachError, match="cannot open it"):
        importer.call("open", "late")
    importer.call("close")
    (SHARED / sent["counter"].decode().lstrip("/")).unlink()


def test_nothing_grows_over_a_thousand_versions(cast: Cast, exporter: Actor) -> None:
    first, second = begin(cast, Importer), begin(cast, Importer)
    for number in (1, 2):
        exporter.call("create", number)
    readers, warm = [first, second], {}
    for version in range(1, 1001):
        number = 1 + version % 2
        if version == 400:
            second.kill()
            assert exporter.call("reap") == ["actor-1", "actor-1"]
            readers[1] = begin(cast, Importer)
        exporter.call("write", number, version)
        for position, reader in enumerate(readers):
            if version <= 2 or (position == 1 and version in (400, 401)):
                attach(exporter, reader, number, f"actor-{position}")
            reader.call("take", number, version)
            if version % 100 == 0:
                assert reader.call("wrong", version) == []
            reader.call("let_go", version)
        if version in (399, 999):  # the exporter's events: two per segment, and two more since the replacement
            warm[version] = [actor.call("stats") for actor in (exporter, first)]
    more = 2 if EMULATED else 0
    before = [{**stats} for stats in warm[399]]
    before[0]["ipc_events"] += more
    assert warm[999] == before
    for number in (1, 2):
        exporter.call("drop", number)
    for reader in readers:
        reader.call("close")
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == 0
    assert exporter.call("stats")["ipc_events"] == 0


# What stands in the way


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "not cudaMallocAsync"),
    ],
)
def test_settings_that_cannot_be_shared_are_refused_with_the_remedy(name: str, value: str, remedy: str) -> None:
    code = """
from busync.errors import DeviceError
from busync.handles.cuda_memory import CudaExporter
exporter = CudaExporter()
try:
    exporter.create(exporter.device(0), 1 << 20)
except DeviceError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, name: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert remedy in done.stdout, done.stdout + done.stderr


def test_a_segment_larger_than_the_device_is_an_allocation_error(exporter: Actor) -> None:
    exporter.call("create", 1)
    with pytest.raises(AllocationError, match="has not that much to spare"):
        exporter.call("create", 2, 1 << 44)
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


@two_devices
@pytest.mark.parametrize("visible", ["1,0", "0,1"])
def test_devices_are_known_by_uuid(cast: Cast, exporter: Actor, visible: str) -> None:
    broadcast(exporter, [begin(cast, Importer, {"CUDA_VISIBLE_DEVICES": visible})])


@two_devices
def test_a_reader_that_does_not_see_the_device_says_so_and_gives_back(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer, {"CUDA_VISIBLE_DEVICES": "1"})
    exporter.call("create", 1)
    sent = attach(exporter, importer, 1)
    with pytest.raises(AttachError, match="does not see it; it sees") as caught:
        importer.call("open", 1)
    assert sent["device"] in str(caught.value)
    importer.call("close")
    exporter.call("drop", 1)
    assert exporter.call("outstanding") == []
    assert exporter.call("allocated") == 0


@two_devices
def test_a_reader_of_another_device_copies_from_its_own(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer, {"CUDA_VISIBLE_DEVICES": "1"})
    exporter.call("create", 1)
    exporter.call("write", 1, 6)
    sent = exporter.call("export", 1, importer.pid, "elsewhere")
    importer.call("receive", 1, sent, on_own=True)
    assert importer.call("load", 1, 6) == []
    with pytest.raises(AssertionError, match="in place on another device"):
        importer.call("take", 1, 6)
    importer.call("close")
    assert exporter.call("count", sent) == 0
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


def test_a_version_is_loaded_into_the_readers_own_tensors(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    exporter.call("create", 1)
    for version in (1, 2):
        exporter.call("write", 1, version)
        if version == 1:
            sent = attach(exporter, importer, 1)
        assert importer.call("load", 1, version) == []
    importer.call("close")
    assert exporter.call("count", sent) == 0
    exporter.call("drop", 1)
    assert exporter.call("allocated") == 0


@two_devices
def test_segments_on_two_devices(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, Importer)
    for number in (1, 2):
        exporter.call("create", number, roles.NBYTES, number - 1)
        exporter.call("write", number, number)
        sent = attach(exporter, importer, number)
        importer.call("take", number, number)
        assert importer.call("wrong", number) == []
        assert importer.call("device", number) == sent["device"]
    for number in (1, 2):
        importer.call("let_go", number)
    finish(exporter, [importer])
    assert exporter.call("allocated", 1) == 0


# Tests of these tests: each of these is a fault, and must be found


@pytest.mark.usefixtures("spoiled")
def test_one_export_for_three_readers_is_found(cast: Cast) -> None:
    exporter, importers = begin(cast, roles.OneExportForAll), [begin(cast, Importer) for _ in range(3)]
    with pytest.raises(AssertionError, match=r"never ended|never given back"):
        broadcast(exporter, importers)


@pytest.mark.usefixtures("spoiled")
def test_a_count_taken_down_before_the_mapping_is_gone_is_found(cast: Cast) -> None:
    exporter, importer = begin(cast, roles.TakesTheLivingForDead), begin(cast, Importer)
    exporter.call("create", 1)
    exporter.call("write", 1, 3)
    attach(exporter, importer, 1)
    importer.call("take", 1, 3)
    exporter.call("drop", 1)
    exporter.call("reap")
    assert exporter.call("allocated") == 0  # though it is open
    exporter.call("occupy", roles.NBYTES + 512, 9)
    assert "long" in importer.call("wrong", 3)
    importer.call("let_go", 3)
    importer.call("close")


@pytest.mark.usefixtures("spoiled")
def test_a_release_before_the_tensors_are_gone_is_found(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, roles.ReleasesAtOnce)
    with pytest.raises(AssertionError, match="released while its tensors were there"):
        broadcast(exporter, [importer])


@pytest.mark.usefixtures("spoiled")
@two_devices
@pytest.mark.skipif(not EMULATED, reason="on a GPU the driver decides what the wrong device does")
def test_an_index_instead_of_the_uuid_is_found(cast: Cast, exporter: Actor) -> None:
    importer = begin(cast, roles.OpensByIndex, {"CUDA_VISIBLE_DEVICES": "1,0"})
    with pytest.raises(AssertionError, match="the label of another device"):
        broadcast(exporter, [importer])
