"""PublisherProtocol: what it answers to each message, and how a publish gets its segment."""

from __future__ import annotations

from typing import Any

import pytest

from busync.errors import OptionError, PoolExhausted, ViolationError
from busync.ids import Incarnation, SegmentId, SessionId, Version
from busync.options import PublisherOptions
from busync.protocol import effects as fx
from busync.protocol.ledger import State
from busync.protocol.publisher import GREETING_TIMEOUT, MAX_TOPICS, PublisherProtocol
from busync.wire import (
    WIRE_VERSION,
    Abandon,
    Ack,
    Announce,
    Digest,
    DoorUp,
    Hello,
    Joined,
    Nack,
    Refuse,
    Release,
    Want,
    Welcome,
    Withdraw,
    decode_door_down,
    encode,
)

TOPIC = "default"
TOKEN = b"t" * 16
LAYOUT = b"L" * 16


class Bench:
    """A publisher core with few words."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.core = PublisherProtocol(PublisherOptions(**({"lease_timeout": 5.0} | options)), Incarnation(9))

    def effects(self) -> list[fx.PublisherEffect]:
        """What it asks for, with its books checked."""
        self.core.validate()
        return self.core.take_effects()

    def join(self, name: str = "me") -> SessionId:
        session = self.core.connected(11, 0, TOKEN, self.now)
        self.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name=name))
        self.core.joined(session, self.now)
        self.effects()
        return session

    def say(self, session: SessionId, *messages: DoorUp) -> None:
        for message in messages:
            self.core.receive(session, message, self.now)

    def reserve(self, nbytes: int = 64, state: State = State.WRITING) -> int:
        return self.core.reserve(TOPIC, nbytes, state, self.now)

    def commit(self, reservation: int, **changes: Any) -> Version | None:
        return self.core.commit(reservation, LAYOUT, "", {}, self.now, **changes)

    def publish(self, nbytes: int = 64) -> Version:
        version = self.commit(self.reserve(nbytes))
        assert version is not None
        return version

    def hold(self, session: SessionId, number: int) -> Announce:
        """The session is granted the newest version."""
        self.effects()
        self.say(session, Want(number=number, have=0))
        (announce,) = self.announces()
        return announce

    def announces(self) -> list[Announce]:
        """On either channel."""
        sent = (e.message for e in self.effects() if isinstance(e, fx.SendBus | fx.SendDoor))
        return [message for message in sent if isinstance(message, Announce)]

    def only(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.effects() if isinstance(effect, kind)]

    def sessions(self) -> list[dict[str, Any]]:
        sessions: list[dict[str, Any]] = self.core.status()["subscribers"]
        return sessions


# Admission


def test_hello_is_answered_with_welcome_and_join_with_joined() -> None:
    bench = Bench()
    session = bench.core.connected(11, 0, TOKEN, bench.now)
    bench.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name=""))
    welcome = Welcome(wire=WIRE_VERSION, incarnation=9, token=TOKEN, slot=1, max_held=2)
    assert bench.effects() == [fx.WriteBoard(1, Version(0)), fx.SendDoor(session, welcome)]
    for _ in range(2):
        bench.core.joined(session, bench.now)
    assert bench.effects() == [fx.SendBus(session, Joined(incarnation=9))]
    assert bench.core.attached(TOPIC) == {session: "pid-11"}
    assert bench.core.deadline() is None


def test_another_wire_version_is_refused_and_whatever_follows_is_ignored() -> None:
    bench = Bench()
    session = bench.core.connected(11, 0, TOKEN, bench.now)
    bench.say(session, Hello(wire=WIRE_VERSION + 1, topic=TOPIC, name="old"))
    send, end = bench.effects()
    assert isinstance(send, fx.SendDoor)
    assert isinstance(send.message, Refuse)
    assert send.message.code == "wire-version"
    assert isinstance(end, fx.EndSession)
    bench.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name="old"))
    bench.core.joined(session, bench.now)
    assert bench.effects() == []
    assert bench.core.topics == {}


def test_a_second_hello_and_anything_before_the_first_are_violations() -> None:
    bench = Bench()
    session = bench.core.connected(11, 0, TOKEN, bench.now)
    with pytest.raises(ViolationError, match="Ack before Hello"):
        bench.say(session, Ack(version=1))
    bench.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name=""))
    with pytest.raises(ViolationError, match="a second Hello"):
        bench.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name=""))


@pytest.mark.parametrize("greet", [False, True])
def test_who_says_nothing_is_ended_once(greet: bool) -> None:
    bench = Bench()
    session = bench.core.connected(11, 0, TOKEN, bench.now)
    bench.now += 1
    if greet:
        bench.say(session, Hello(wire=WIRE_VERSION, topic=TOPIC, name=""))
    bench.effects()
    deadline = bench.core.deadline()
    assert deadline == 100 + GREETING_TIMEOUT + greet
    bench.now = deadline
    for _ in range(2):
        bench.core.handle_timer(bench.now)
    assert bench.effects() == [fx.EndSession(session, "said nothing for too long")]
    assert bench.core.deadline() is None, "the timer must not fire for ever"
    bench.core.joined(session, bench.now)
    assert bench.effects() == [], "too late"
    bench.core.lost(session, bench.now)
    assert (bench.core.sessions, bench.core.topics) == ({}, {})


def test_topics_run_out_and_unused_ones_are_given_back() -> None:
    bench = Bench()
    sessions = [bench.core.connected(11, 0, TOKEN, bench.now) for _ in range(MAX_TOPICS + 1)]
    for i, session in enumerate(sessions):
        bench.say(session, Hello(wire=WIRE_VERSION, topic=f"t{i}", name=""))
    *_, refusal, _ = bench.effects()
    assert isinstance(refusal, fx.SendDoor)
    assert isinstance(refusal.message, Refuse)
    assert refusal.message.code == "topics"
    bench.core.lost(sessions[6], bench.now)
    assert bench.core.topic("mine").slot == 7
    bench.core.lost(sessions[7], bench.now)
    assert "mine" in bench.core.topics


def test_a_publish_takes_the_place_of_a_topic_that_readers_alone_asked_for() -> None:
    bench = Bench()
    sessions = [bench.core.connected(11, 0, TOKEN, bench.now) for _ in range(MAX_TOPICS)]
    for i, session in enumerate(sessions):
        bench.say(session, Hello(wire=WIRE_VERSION, topic=f"t{i}", name=""))
    bench.effects()
    for i in range(MAX_TOPICS):
        bench.core.reserve(f"mine{i}", 64, State.WRITING, bench.now)
        ended = bench.only(fx.EndSession)
        assert [e.session for e in ended] == [sessions[i]]
        bench.core.lost(sessions[i], bench.now)
    assert {topic.name for topic in bench.core.topics.values()} == {f"mine{i}" for i in range(MAX_TOPICS)}
    with pytest.raises(OptionError):
        bench.core.reserve("one more", 64, State.WRITING, bench.now)


def test_a_refusal_fits_the_wire_whatever_the_name() -> None:
    bench = Bench()
    for i in range(MAX_TOPICS):
        bench.core.topic(f"t{i}")
    session = bench.core.connected(11, 0, TOKEN, bench.now)
    bench.say(session, Hello(wire=WIRE_VERSION, topic="\u00e9" * 100, name=""))
    (send,) = bench.only(fx.SendDoor)
    assert decode_door_down(encode(send.message)) == send.message


def test_unprintable_names_reach_neither_logs_nor_status() -> None:
    bench = Bench()
    for topic, name in (("\U000e0001" * 50, ""), ("default", "a\nb")):
        session = bench.core.connected(11, 0, TOKEN, bench.now)
        with pytest.raises(ViolationError, match="printable"):
            bench.say(session, Hello(wire=WIRE_VERSION, topic=topic, name=name))


def test_a_topic_with_a_loan_or_a_version_stays() -> None:
    bench = Bench()
    session = bench.join()
    loan = bench.reserve(state=State.LOANED)
    bench.core.lost(session, bench.now)
    assert TOPIC in bench.core.topics
    bench.commit(loan)
    bench.core.lost(bench.join(), bench.now)
    assert bench.core.topics[TOPIC].version == 1


# Granting


def test_a_want_is_answered_at_once_or_when_something_newer_is_published() -> None:
    bench = Bench()
    session = bench.join()
    bench.say(session, Want(number=1, have=0))
    assert bench.effects() == []
    reservation = bench.reserve()
    assert bench.effects() == [fx.Reserved(reservation, SegmentId(1), 64, True, 0.0)]
    bench.core.commit(reservation, LAYOUT, "a", {"k": 1}, 7.0)
    lease = next(iter(bench.core.sessions[session].leases))
    announce = Announce(
        incarnation=9, number=1, lease=lease, version=1, layout=LAYOUT, segment=1,
        label="a", published_at=7.0, values={"k": 1},
    )  # fmt: skip
    assert bench.effects() == [
        fx.WriteBoard(1, Version(1)),
        fx.PushSegment(session, SegmentId(1)),
        fx.SendManifest(session, LAYOUT),
        fx.SendBus(session, announce),
    ]
    bench.say(session, Want(number=2, have=1))
    assert bench.effects() == []


def test_a_segment_and_a_layout_are_sent_once_per_session() -> None:
    bench = Bench()
    session = bench.join()
    for number in range(1, 7):
        bench.publish()
        lease = bench.hold(session, number).lease
        bench.say(session, Release(lease=lease))
    bench.publish()
    bench.effects()
    bench.say(session, Want(number=9, have=0))
    assert [type(e) for e in bench.effects()] == [fx.SendDoor]


def test_a_grant_follows_its_layout_on_the_bus_until_the_reader_has_asked_again() -> None:
    bench = Bench()
    session = bench.join()
    bench.publish()
    first = bench.hold(session, 1)
    bench.say(session, Withdraw(number=1))
    bench.effects()
    bench.say(session, Want(number=2, have=0))
    assert [type(e) for e in bench.effects()] == [fx.SendBus], "the layout may still be under way"
    bench.say(session, Withdraw(number=1), Withdraw(number=first.number))
    bench.publish()
    bench.say(session, Want(number=3, have=1))
    assert [type(e) for e in bench.effects() if getattr(e, "session", 0)] == [fx.PushSegment, fx.SendDoor]


def test_a_layout_goes_back_and_forth_on_the_bus() -> None:
    bench = Bench()
    session = bench.join()
    ways = []
    for number, layout in enumerate((LAYOUT, LAYOUT, b"other layout 16b", LAYOUT, LAYOUT), 1):
        version = bench.core.commit(bench.reserve(), layout, "", {}, bench.now)
        assert version == number
        bench.effects()
        bench.say(session, Want(number=number, have=number - 1))
        sent = [e for e in bench.effects() if isinstance(e, fx.SendBus | fx.SendDoor | fx.SendManifest)]
        ways.append([type(e) for e in sent])
        bench.say(session, *(Release(lease=lease) for lease in list(bench.core.sessions[session].leases)))
    with_layout = [fx.SendManifest, fx.SendBus]
    assert ways == [with_layout, [fx.SendDoor], with_layout, with_layout, [fx.SendDoor]]


def test_a_repeated_want_is_ignored_and_a_second_open_one_is_a_violation() -> None:
    bench = Bench()
    session = bench.join()
    bench.say(session, Want(number=3, have=0), Want(number=3, have=0), Want(number=2, have=0))
    with pytest.raises(ViolationError, match="a second Want"):
        bench.say(session, Want(number=4, have=0))


def test_nobody_holds_more_than_max_held_and_a_release_continues() -> None:
    bench = Bench()
    session = bench.join()
    bench.publish()
    first = bench.hold(session, 1)
    bench.publish()
    bench.hold(session, 2)
    bench.publish()
    bench.effects()
    bench.say(session, Want(number=3, have=2))
    assert bench.effects() == []
    bench.say(session, Release(lease=first.lease))
    (announce,) = bench.announces()
    assert (announce.number, announce.version) == (3, 3)
    assert bench.sessions()[0]["skipped"] == 0


def test_withdraw_ends_the_want_or_the_grant_that_crossed_it() -> None:
    bench = Bench()
    session = bench.join()
    bench.say(session, Want(number=1, have=0), Withdraw(number=1))
    bench.publish()
    assert bench.announces() == []
    bench.say(session, Want(number=2, have=0), Withdraw(number=2), Withdraw(number=2))
    assert bench.core.sessions[session].leases == {}
    bench.publish()
    assert bench.core.topics[TOPIC].ledger.free == {1: 64}, "taken back, warm"
    assert bench.hold(session, 3).version == 2


def test_what_a_session_says_about_leases_of_others_changes_nothing() -> None:
    bench = Bench()
    holder, other = bench.join("a"), bench.join("b")
    bench.publish()
    lease = bench.hold(holder, 1).lease
    bench.say(other, Release(lease=lease), Abandon(leases=(lease, 12345)), Release(lease=999), Withdraw(number=1))
    bench.publish()
    assert bench.core.sessions[holder].leases
    assert [e.state for e in bench.core.topics[TOPIC].ledger.entries] == [State.RETIRED, State.PUBLISHED]


def test_an_ack_of_what_was_never_granted_is_a_violation() -> None:
    bench = Bench()
    session = bench.join()
    bench.publish()
    with pytest.raises(ViolationError, match="never granted"):
        bench.say(session, Ack(version=1))


def test_abandon_and_its_late_release() -> None:
    bench = Bench()
    session = bench.join()
    bench.publish()
    lease = bench.hold(session, 1).lease
    bench.say(session, Abandon(leases=(lease,)))
    bench.publish()
    assert fx.DropSegment(SegmentId(1)) in bench.effects()
    assert bench.core.sessions[session].leases, "it counts until it is released"
    bench.say(session, Release(lease=lease), Abandon(leases=(lease,)))
    assert bench.core.sessions[session].leases == {}
    assert len(bench.core.topics[TOPIC].ledger.entries) == 1


def test_a_session_that_ends_with_leases_takes_their_segments_with_it() -> None:
    bench = Bench()
    session = bench.join()
    bench.publish()
    bench.hold(session, 1)
    bench.core.lost(session, bench.now)
    bench.core.lost(session, bench.now)
    bench.say(session, Ack(version=1))
    assert bench.effects() == []
    bench.publish()
    assert fx.DropSegment(SegmentId(1)) in bench.effects()
    counters = bench.core.status()["counters"]
    assert (counters["broken leases"], counters["abandoned"]) == (1, 1)


# Digests


def test_a_digest_is_computed_once_and_keeps_the_segment() -> None:
    bench = Bench()
    sessions = [bench.join(), bench.join()]
    bench.publish()
    bench.effects()
    for session in sessions:
        bench.say(session, Want(number=1, have=0, digest=True))
    assert bench.only(fx.ComputeDigest) == [fx.ComputeDigest(TOPIC, Version(1), SegmentId(1), LAYOUT)]
    for session in sessions:
        bench.say(session, Withdraw(number=1))
    bench.publish()
    assert bench.core.topics[TOPIC].ledger.free == {}, "it is still being read"
    bench.core.lost(sessions[0], bench.now)
    bench.effects()
    bench.core.digest_done(TOPIC, Version(1), b"d" * 32, bench.now)
    digest = Digest(incarnation=9, version=1, digest=b"d" * 32)
    assert bench.effects() == [fx.SendBus(sessions[1], digest)]
    assert bench.core.topics[TOPIC].ledger.free == {1: 64}


def test_a_digest_that_is_known_comes_with_the_grant_and_a_failed_one_is_tried_again() -> None:
    bench = Bench()
    session, other = bench.join(), bench.join()
    bench.publish()
    bench.say(session, Want(number=1, have=0, digest=True))
    bench.core.digest_done(TOPIC, Version(1), None, bench.now)
    bench.effects()
    bench.say(other, Want(number=1, have=0, digest=True))
    assert len(bench.only(fx.ComputeDigest)) == 1
    bench.core.digest_done(TOPIC, Version(1), b"d" * 32, bench.now)
    bench.effects()
    bench.say(session, Want(number=2, have=0, digest=True))
    assert [type(e.message) for e in bench.effects()] == [Announce, Digest]  # type: ignore[union-attr]


# Getting a segment


def test_a_publish_waits_then_abandons_the_oldest_and_does_not_wait_for_it_again() -> None:
    bench = Bench(max_segments=2)
    session = bench.join("slow")
    bench.publish()
    bench.hold(session, 1)
    bench.publish()
    bench.hold(session, 2)
    bench.effects()
    reservation = bench.reserve()
    assert bench.effects() == []
    assert bench.core.deadline() == 105.0
    bench.now = 104.9
    bench.core.handle_timer(bench.now)
    assert bench.effects() == []
    bench.now = 105.0
    bench.core.handle_timer(bench.now)
    assert bench.effects() == [
        fx.Reserved(reservation, SegmentId(3), 64, True, 5.0, ("slow",)),
        fx.DropSegment(SegmentId(1)),
    ]
    assert bench.core.deadline() is None
    assert bench.sessions()[0]["state"] == "overdue"
    bench.commit(reservation)
    bench.effects()
    again = bench.reserve()
    (reserved,) = bench.only(fx.Reserved)
    assert (reserved.reservation, reserved.waited) == (again, 0.0), "not waited for twice"


def test_a_publish_that_waits_is_served_by_a_release() -> None:
    bench = Bench(max_segments=2)
    session = bench.join("slow")
    bench.publish()
    lease = bench.hold(session, 1).lease
    bench.publish()
    bench.effects()
    reservation = bench.reserve()
    bench.now += 1
    bench.say(session, Release(lease=lease))
    assert bench.effects() == [fx.Reserved(reservation, SegmentId(1), 64, False, 1.0, ("slow",))]


def test_skip_answers_at_once_with_an_error_for_a_loan() -> None:
    bench = Bench(max_segments=2, when_full="skip")
    session = bench.join()
    bench.publish()
    bench.hold(session, 1)
    bench.publish()
    bench.effects()
    skipped = bench.reserve()
    (reserved,) = bench.only(fx.Reserved)
    assert (reserved.reservation, reserved.skipped) == (skipped, True)
    bench.reserve(state=State.LOANED)
    (reserved,) = bench.only(fx.Reserved)
    assert isinstance(reserved.error, PoolExhausted)
    assert (reserved.error.max_segments, reserved.error.loans, reserved.skipped) == (2, 0, False)
    assert bench.core.status()["counters"]["skipped"] == 1
    assert bench.core.deadline() is None


def test_loans_that_hold_everything_are_an_error_at_once() -> None:
    bench = Bench(max_segments=2)
    loans = [bench.reserve(state=State.LOANED) for _ in range(2)]
    bench.effects()
    bench.reserve()
    (reserved,) = bench.only(fx.Reserved)
    assert isinstance(reserved.error, PoolExhausted)
    assert reserved.error.loans == 2
    for loan in loans:
        bench.core.discard(loan, bench.now)
    assert bench.publish() == 1


def test_a_referenced_loan_is_refused_and_can_be_published_later() -> None:
    bench = Bench()
    loan = bench.reserve(state=State.LOANED)
    assert bench.commit(loan, referenced=True) is None
    assert bench.publish() == 1
    assert bench.commit(loan) == 2


def test_a_loan_given_back_while_referenced_is_never_used_again() -> None:
    bench = Bench()
    loan = bench.reserve(state=State.LOANED)
    bench.effects()
    bench.core.discard(loan, bench.now, referenced=True)
    assert bench.effects() == [fx.DropSegment(SegmentId(1))]


def test_a_copy_that_still_runs_keeps_its_segment_until_it_returns() -> None:
    bench = Bench(max_segments=2)
    for _ in range(3):
        bench.publish()
    straggler = bench.reserve()
    bench.effects()
    bench.core.discard(straggler, bench.now, referenced=True)
    waiting = bench.reserve()
    assert bench.effects() == []
    assert bench.core.deadline() is None, "time cannot help, only the copy's return"
    bench.now += 60
    bench.core.handle_timer(bench.now)
    assert bench.effects() == []
    bench.core.discard(straggler, bench.now)
    (reserved,) = bench.only(fx.Reserved)
    assert (reserved.reservation, reserved.fresh) == (waiting, False)
    bench.core.discard(straggler, bench.now)
    assert bench.effects() == []


def test_a_cancelled_publish_burns_no_number_and_no_segment() -> None:
    bench = Bench(max_segments=2)
    bench.core.discard(bench.reserve(), bench.now)
    failed = bench.reserve()
    bench.core.allocation_failed(failed, bench.now)
    bench.core.discard(failed, bench.now)
    assert bench.publish() == 1
    assert bench.core.topics[TOPIC].ledger.pooled == 1


def test_layouts_are_dropped_when_no_version_has_them() -> None:
    bench = Bench(max_segments=2)
    for layout in (b"a" * 16, b"b" * 16, b"c" * 16):
        bench.core.commit(bench.reserve(), layout, "", {}, bench.now)
    assert bench.only(fx.DropLayout) == [fx.DropLayout(b"a" * 16), fx.DropLayout(b"b" * 16)]


# Waiting


def test_wait_for_all_counts_who_was_attached_and_acks_are_cumulative() -> None:
    bench = Bench()
    names = {bench.join(name): name for name in "abcd"}
    a, b, c, d = names
    bench.publish()
    bench.publish()
    wait = bench.core.wait(TOPIC, Version(1), "acked", None, bench.core.attached(TOPIC), bench.now + 30)
    for session in (a, b):
        bench.hold(session, 1)
        bench.say(session, Ack(version=2))
    bench.core.lost(c, bench.now)
    assert bench.only(fx.WaitDone) == []
    bench.say(d, Nack(version=2, code="apply", text="no room"))
    assert bench.effects() == [fx.WaitDone(wait, ("a", "b"), (), ("c",), (("d", "no room"),))]


def test_a_wait_that_begins_after_a_nack_knows_of_it() -> None:
    bench = Bench()
    session = bench.join("a")
    bench.publish()
    bench.hold(session, 1)
    bench.say(session, Nack(version=1, code="apply", text="no room"))
    bench.effects()
    wait = bench.core.wait(TOPIC, Version(1), "acked", None, bench.core.attached(TOPIC), bench.now + 30)
    assert bench.effects() == [fx.WaitDone(wait, (), (), (), (("a", "no room"),))]
    bench.publish()
    bench.hold(session, 2)
    bench.say(session, Ack(version=2))  # stands for version 1 as well
    bench.effects()
    wait = bench.core.wait(TOPIC, Version(1), "acked", None, bench.core.attached(TOPIC), bench.now + 30)
    assert bench.effects() == [fx.WaitDone(wait, ("a",), (), (), ())]


def test_held_names_who_holds_what() -> None:
    bench = Bench()
    assert bench.core.held() == []
    a, b = bench.join("a"), bench.join("b")
    bench.publish()
    lease = bench.hold(a, 1).lease
    bench.hold(b, 1)
    bench.publish()
    bench.hold(a, 2)
    assert bench.core.held() == [(TOPIC, 1, {a: "a", b: "b"}), (TOPIC, 2, {a: "a"})]
    bench.say(a, Release(lease=lease))
    bench.core.lost(b, bench.now)
    assert bench.core.held() == [(TOPIC, 2, {a: "a"})]


def test_versions_with_unchanged_content_are_counted() -> None:
    bench = Bench()
    session = bench.join("a")
    contents = [b"x", b"x", b"y", b"x", None, b"x"]
    for number, content in enumerate(contents, 1):
        version = bench.publish()
        bench.say(session, Want(number=number, have=0, digest=True))
        leases = list(bench.core.sessions[session].leases)
        bench.core.digest_done(TOPIC, version, content and content * 32, bench.now)
        bench.say(session, *(Release(lease=lease) for lease in leases))
    assert bench.core.status()["counters"]["unchanged"] == 2
    assert bench.core.topics[TOPIC].digested == (6, b"x" * 32)


def test_wait_for_a_number_counts_later_joiners() -> None:
    bench = Bench()
    bench.publish()
    wait = bench.core.wait(TOPIC, Version(1), "acked", 1, {}, bench.now + 30)
    session = bench.join("late")
    bench.hold(session, 1)
    bench.say(session, Ack(version=1))
    assert bench.effects() == [fx.WaitDone(wait, ("late",), (), (), ())]


def test_wait_for_releases() -> None:
    bench = Bench()
    session = bench.join("a")
    bench.publish()
    lease = bench.hold(session, 1).lease
    bench.publish()
    wait = bench.core.wait(TOPIC, Version(1), "released", None, bench.core.attached(TOPIC), bench.now + 30)
    assert bench.only(fx.WaitDone) == []
    bench.say(session, Release(lease=lease))
    assert bench.effects() == [fx.WaitDone(wait, ("a",), (), (), ())]


def test_leases_end_with_a_want_before_it_is_answered() -> None:
    bench = Bench(max_segments=2, lease_timeout=50.0)
    session, other = bench.join("a"), bench.join("b")
    bench.publish()
    lease, theirs = bench.hold(session, 1).lease, bench.hold(other, 1).lease
    bench.publish()
    everybody = bench.core.attached(TOPIC)
    wait = bench.core.wait(TOPIC, Version(1), "released", None, everybody, bench.now + 30)
    bench.effects()
    bench.core.reserve(TOPIC, 64, State.WRITING, bench.now)
    assert bench.effects() == [], "the publish waits for a segment"
    bench.say(session, Want(number=2, have=1, released=(lease, theirs, 999)))
    (announce,) = bench.announces()
    assert announce.version == 2
    assert bench.core.sessions[other].leases, "another session's lease"
    bench.say(other, Want(number=2, have=1, released=(theirs,)))
    effects = bench.effects()
    assert [type(effect) for effect in effects] == [fx.PushSegment, fx.SendDoor, fx.Reserved, fx.WaitDone]
    assert effects[-1] == fx.WaitDone(wait, ("a", "b"), (), (), ())


def test_a_wait_times_out_is_cancelled_or_has_nobody_to_wait_for() -> None:
    bench = Bench()
    session = bench.join("a")
    bench.publish()
    bench.effects()
    everybody = bench.core.attached(TOPIC)
    wait = bench.core.wait(TOPIC, Version(1), "acked", None, everybody, bench.now + 1)
    cancelled = bench.core.wait(TOPIC, Version(1), "acked", None, everybody, bench.now + 1)
    bench.core.cancel_wait(cancelled)
    assert bench.core.deadline() == 101.0
    bench.now = 101.0
    bench.core.handle_timer(bench.now)
    assert bench.effects() == [fx.WaitDone(wait, (), ("a",), (), ())]
    bench.core.lost(session, bench.now)
    late = bench.core.wait(TOPIC, Version(1), "acked", None, everybody, bench.now + 1)
    assert bench.effects() == [fx.WaitDone(late, (), (), ("a",), ())]
    alone = bench.core.wait(TOPIC, Version(1), "acked", None, {}, bench.now + 1)
    assert bench.effects() == [fx.WaitDone(alone, (), (), (), ())]


def test_status_charges_what_is_held_to_its_holder() -> None:
    bench = Bench()
    session = bench.join("a")
    bench.publish()
    bench.hold(session, 1)
    bench.say(session, Ack(version=1))
    bench.publish()
    topic = bench.core.status()["topics"][TOPIC]
    assert [(v["version"], v["state"], v["holders"]) for v in topic["versions"]] == [
        (1, "RETIRED", ["a"]),
        (2, "PUBLISHED", []),
    ]
    assert (topic["segments"], topic["bytes"]) == (2, 128)
    (subscriber,) = bench.sessions()
    assert (subscriber["version"], subscriber["lag"], subscriber["state"]) == (1, 1, "holding")
