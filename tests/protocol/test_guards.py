"""Every guard protects something: with it switched off, a short story ends in a fault.

Each story is first told with the guard in place, where nothing may go wrong, then without it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busync.errors import ViolationError
from busync.ids import Version
from busync.options import PublisherOptions
from busync.protocol import guards
from busync.protocol.guards import GUARDS
from busync.protocol.subscriber import SubscriberProtocol
from busync.wire import WIRE_VERSION, Announce, Joined, Release, Segment, Want, Welcome, encode
from tests.protocol.harness import PeerNet
from tests.protocol.subscriber_process import SubscriberProcess
from tests.protocol.world import Fault, layout_for, one_by_one, require

Story = Callable[[], None]
TOPIC = "topic-0"


def world(readers: int = 1, *, digests: bool = False, max_segments: int = 2) -> PeerNet:
    """A world whose readers are attached."""
    options = PublisherOptions(max_segments=max_segments, lease_timeout=5)
    net = PeerNet(options, readers, digests=digests)
    for reader in net.readers:
        reader.connect()
    net.drain()
    return net


def adopt(net: PeerNet, reader: SubscriberProcess) -> None:
    """The reader adopts the newest version in place."""
    reader.demand()
    net.drain()


def publish_twice(net: PeerNet) -> None:
    """Enough to write into the other segment, and to want to write into the first again."""
    for _ in range(2):
        job = net.publisher.reserve(TOPIC, 64)
        if job.phase == "reserved":
            net.publisher.write(job)
            net.publisher.commit(job)
        net.check()


def a_reader_sits_in_place() -> None:
    net = world()
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    publish_twice(net)


def a_reader_is_killed_while_its_memory_is_mapped() -> None:
    net = world()
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    net.kill(net.readers[0])
    net.drain()
    publish_twice(net)


def a_digest_is_computed_while_versions_go_by() -> None:
    net = world(digests=True)
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    for lease in list(net.readers[0].mappings):
        net.readers[0].release(lease)
    net.drain()
    publish_twice(net)


def a_loan_is_published_while_the_caller_keeps_a_tensor() -> None:
    net = world()
    job = net.publisher.reserve(TOPIC, 64, loan=True)
    net.publisher.write(job)
    net.publisher.commit(job, referenced=True)
    adopt(net, net.readers[0])
    net.publisher.scribble()
    net.check()


def a_reader_releases_what_another_holds() -> None:
    net = world(2)
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    (lease,) = net.readers[0].mappings
    link = net.readers[1].link
    assert link is not None
    link.push("door_up", encode(Release(lease=lease)))
    net.drain()
    publish_twice(net)


def a_reader_asks_for_more_than_it_may_hold() -> None:
    net = world(max_segments=4)
    for _ in range(3):
        net.publisher.publish(TOPIC)
        adopt(net, net.readers[0])
        net.check()


def a_reader_asks_for_something_newer_than_the_newest() -> None:
    net = world()
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    adopt(net, net.readers[0])
    require(net.readers[0].grants == [1], "a version was handed over twice")


def a_want_arrives_twice() -> None:
    net = world()
    net.publisher.publish(TOPIC)
    adopt(net, net.readers[0])
    link = net.readers[0].link
    assert link is not None
    net.publisher.receive_message(link, Want(number=1, have=0))
    net.publisher.publish(TOPIC)
    net.settle()


def a_grant_arrives_after_its_want_was_withdrawn() -> None:
    net = world()
    reader, link = net.readers[0], net.readers[0].link
    assert link is not None
    reader.demand()
    net.drain()
    net.publisher.publish(TOPIC)
    reader.withdraw()
    net.deliver(link, "door_up")  # the publisher knows first
    reader.have = Version(0)  # the application asks again, and takes whatever is handed over
    net.drain()
    publish_twice(net)


def an_announcement_overtakes_a_layout_whose_grant_was_withdrawn() -> None:
    net = world()
    reader, link = net.readers[0], net.readers[0].link
    assert link is not None
    net.publisher.publish(TOPIC)
    reader.demand()
    net.deliver(link, "door_up")
    reader.withdraw()
    reader.demand()
    while link.queues["door_up"] or link.queues["door_down"]:
        for queue in ("door_up", "door_down"):
            if link.queues[queue]:
                net.deliver(link, queue)
    net.drain()
    require(net.readers[0].grants == [1], "the session ended")


def a_segment_of_an_earlier_publisher_arrives_late() -> None:
    net = world()
    reader, link = net.readers[0], net.readers[0].link
    assert link is not None
    reader.demand()
    net.drain()
    net.publisher.publish(TOPIC)
    late = link.queues["door_down"].popleft()
    net.start_publisher()
    net.drain()
    reader.connect()
    net.drain()
    assert reader.link is not None
    reader.receive(reader.link, "door_down", late)
    net.publisher.publish(TOPIC)
    link = reader.link
    while link.queues["bus_down"]:
        net.deliver(link, "bus_down")
    net.settle()


def a_publisher_goes_back_to_an_older_version() -> None:
    core = SubscriberProtocol("default", "")
    manifest = layout_for(64, 1)
    core.start()
    core.receive_door(Welcome(wire=WIRE_VERSION, incarnation=1, token=b"t" * 16, slot=1, max_held=2))
    core.receive_bus(Joined(incarnation=1))
    core.receive_bus(one_by_one(manifest, core.incarnation)[0])  # type: ignore[arg-type]
    core.receive_door(Segment(incarnation=1, segment=1, nbytes=64))
    for number, version in ((1, 2), (2, 1)):
        core.demand(Version(number - 1))
        announce = Announce(
            incarnation=1, number=number, lease=number, version=version, layout=manifest.digest, segment=1,
            label="", published_at=0.0, values={},
        )  # fmt: skip
        try:
            core.receive_bus(announce)
        except ViolationError:
            return
    raise Fault("an older version was handed over")


def a_segment_leaves_the_pool_while_its_announce_is_on_the_way() -> None:
    net = world(readers=2)
    slow, killed = net.readers[0], net.readers[1]
    net.publisher.publish(TOPIC)
    adopt(net, killed)
    slow.demand()
    link = slow.link
    assert link is not None
    while link.queues["door_up"]:
        net.deliver(link, "door_up")
    dead = killed.link
    assert dead is not None
    net.kill(killed)
    while dead.queues["door_up"]:
        net.deliver(dead, "door_up")
    net.publisher.publish(TOPIC)
    while link.queues["door_down"]:
        net.deliver(link, "door_down")
    while link.queues["bus_down"]:
        net.deliver(link, "bus_down")
    require(slow.grants == [1], "a grant never completes: its descriptor was thrown away")


def a_segment_is_replaced() -> None:
    net = world()
    for size in (64, 256, 1024, 4096):
        net.publisher.publish(TOPIC, size)
        adopt(net, net.readers[0])
        for lease in list(net.readers[0].mappings):
            net.readers[0].release(lease)
        net.drain()
    require(len(net.readers[0].fds) <= 2, "descriptors of dead segments pile up")


STORIES: dict[str, Story] = {
    "unleased": a_reader_sits_in_place,
    "untainted": a_reader_is_killed_while_its_memory_is_mapped,
    "unpinned": a_digest_is_computed_while_versions_go_by,
    "unreferenced": a_loan_is_published_while_the_caller_keeps_a_tensor,
    "own_lease": a_reader_releases_what_another_holds,
    "within_held": a_reader_asks_for_more_than_it_may_hold,
    "newer": a_reader_asks_for_something_newer_than_the_newest,
    "later_number": a_want_arrives_twice,
    "asked_for": a_grant_arrives_after_its_want_was_withdrawn,
    "was_taken": an_announcement_overtakes_a_layout_whose_grant_was_withdrawn,
    "same_incarnation": a_segment_of_an_earlier_publisher_arrives_late,
    "not_older": a_publisher_goes_back_to_an_older_version,
    "unneeded": a_segment_leaves_the_pool_while_its_announce_is_on_the_way,
}


@pytest.mark.parametrize("name", GUARDS)
def test_with_the_guard_nothing_goes_wrong(name: str) -> None:
    STORIES[name]()


@pytest.mark.parametrize("name", GUARDS)
def test_without_the_guard_something_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, name, lambda *_: True)
    with pytest.raises(AssertionError):
        STORIES[name]()


def test_forgetting_nothing_piles_up_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    a_segment_is_replaced()
    monkeypatch.setattr(guards, "unneeded", lambda *_: False)
    with pytest.raises(Fault):
        a_segment_is_replaced()


def test_no_story_is_about_a_guard_that_is_gone() -> None:
    assert set(STORIES) == set(GUARDS)
