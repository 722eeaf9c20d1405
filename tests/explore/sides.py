"""One reader with its connections: the half of a state that only its own steps and the publisher's answers change."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from busync.wire import Announce, Hello, Join, Joined, ManifestPart, Release, Segment, Want, Welcome, Withdraw
from tests.explore.bounds import FREE, SHIFT, Bound
from tests.explore.messages import END, Packet, Packets
from tests.explore.publisher import SLOTS
from tests.explore.reader import NOT_WAITING, ReaderProcess, ReaderState, ReaderStep
from tests.explore.steps import Action, describe_error

OVER = 99  #: any incarnation that is over, where there is any other reader: the one that lives is 1
ENDED, COUNTED, DEAD = 0, 1, 2  #: the publisher ended the session, counts it, is dead
Remnants = tuple[tuple[int, int], ...]  #: segment and version, mapped by whoever will never say a word about it


class Link(NamedTuple):
    """The present session. Each direction is in the order of sending, both channels together."""

    slot: int
    counted: int
    up: tuple[Packet, ...]
    down: tuple[Packet, ...]


class Side(NamedTuple):
    """One reader, its session, and what is still under way from sessions that it has ended."""

    reader: ReaderState = ReaderState()
    link: Link | None = None
    old: tuple[tuple[int, tuple[Packet, ...]], ...] = ()
    gone: bool = False  #: the reader will not come again; only what it left counts (see ``views``)


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that can happen next. ``{r}`` in the text stands for the reader."""

    text: str
    cost: int = FREE  #: the shift of what it uses up
    side: int = -1  #: what becomes of the side, before the publisher answers; -1: nothing
    remnants: Remnants = ()
    action: Action | None = None  #: of the publisher; its first argument is the slot of the session
    fault: str = ""
    repeated: bool = False  #: what is delivered is a repetition, so it may be a violation
    again: int = -1  #: the side that goes on after the end of the session, where ``side`` is what it left


class SideFacts:
    """What the invariants ask about a side."""

    def __init__(self, side: Side, packets: Packets, bound: Bound) -> None:
        link, reader = side.link, side.reader
        self.link = link
        self.counted = link is not None and link.counted == COUNTED
        self.slot = link.slot if link else -1
        alive = link is not None and link.counted != DEAD
        self.maps = tuple((m.segment, m.version) for m in reader.mappings) if alive else ()
        self.mapped = frozenset(m.lease for m in reader.mappings)
        self.held = frozenset(lease for lease, _ in reader.leases)
        self.quiet = self.counted and link is not None and not link.up and not link.down
        self.attached = reader.attached
        self.have = reader.have
        self.free_hand = len(reader.leases) - len(reader.spare) < bound.max_held
        #: leases whose end is certain: None means all, because the end of the door is under way
        self.ending: frozenset[int] | None = None
        if link is not None and END not in link.up:
            self.ending = self._ending(link, reader, packets)

    def _ending(self, link: Link, reader: ReaderState, packets: Packets) -> frozenset[int]:
        up = [packets.message(packet) for packet in link.up if packet > 0]
        open_numbers = {m.number for m in up if isinstance(m, Withdraw)}
        if reader.want is not None:
            open_numbers.add(reader.want[0])
        down = [packet for packet in link.down if packet > 0]
        announces = [packets.message(p) for p in (*down, *([reader.announce] if reader.announce else []))]
        names = {m.lease for m in announces if isinstance(m, Announce) and m.number in open_numbers}
        # A Withdraw ends what answers its Want even if the answer has come and was thrown away.
        names |= {m.number for m in up if isinstance(m, Withdraw)}
        names |= {m.lease for m in up if isinstance(m, Release)}
        names |= {lease for m in up if isinstance(m, Want) for lease in m.released}
        return frozenset(names | self.mapped | {*reader.spare})


class Sides:
    """The table of all sides, and what can happen to each."""

    def __init__(self, bound: Bound, packets: Packets) -> None:
        self.bound = bound
        self.packets = packets
        self.table: list[Side] = []
        self.facts: list[SideFacts] = []
        self._numbers: dict[Side, int] = {}
        self._moves: dict[int, list[Move]] = {}
        self._hurry: dict[tuple[int, bool], list[Move]] = {}
        self._calm_moves: dict[int, list[Move]] = {}
        self._answers: dict[tuple[int, int, tuple[Packet, ...], bool], int] = {}
        self._deaths: dict[int, int] = {}

    @cached_property
    def start(self) -> int:
        """A reader that has not connected."""
        return self.number(Side())

    def number(self, side: Side) -> int:
        """Equal sides have equal numbers."""
        number = self._numbers.get(side)
        if number is None:
            number = self._numbers[side] = len(self.table)
            self.table.append(side)
            self.facts.append(SideFacts(side, self.packets, self.bound))
        return number

    def moves(self, number: int) -> list[Move]:
        """What can happen next to a side."""
        moves = self._moves.get(number)
        if moves is None:
            side = self.table[number]
            moves = [*self._application(side), *self._deliveries(side), *self._old(side), *self._ends(side)]
            moves = self._moves[number] = [m for m in moves if self._fits(m.side)]
        return moves

    def calm_moves(self, number: int) -> list[Move]:
        """What can happen to a side when no fault is left to come.

        What a reader does of itself reaches the publisher in the same step, and nothing is ahead of it: it commutes
        with everything that could come between, as only the order in which the publisher hears things matters.
        """
        moves = self._calm_moves.get(number)
        if moves is None:
            side = self.table[number]
            moves = self._calm_moves[number] = [*self._calm_application(side), *self._up_free(side), *self._old(side)]
        return moves

    def _up_free(self, side: Side) -> list[Move]:
        return [m for m in self._up(side, side.link) if m.cost == FREE] if side.link else []

    def _calm_application(self, side: Side) -> list[Move]:
        if side.link is not None and side.link.up:
            return []
        moves = []
        for move in self._application(side):
            after = self.table[move.side] if move.side >= 0 else side
            alone = after.link is not None and len(after.link.up) == 1
            if move.cost == FREE and move.action is None and not move.fault and alone and after.link is not None:
                (packet,) = after.link.up
                number = self.number(after._replace(link=after.link._replace(up=())))
                text = f"{move.text}; the publisher gets {self.packets.text(packet)}"
                move = Move(text, FREE, number, (), ("receive", after.link.slot, packet))
            if move.cost == FREE:
                moves.append(move)
        return moves

    def idle_end(self, number: int, busy: Container[int]) -> Move | None:
        """The end of an earlier session that has no lease and no Want at the publisher, which makes no difference."""
        for i, (slot, up) in enumerate(self.table[number].old):
            if up[0] == END and slot not in busy and self.bound.reduced:
                return self._old(self.table[number])[i]
        return None

    def hurry(self, number: int, *, calm: bool = False) -> list[Move]:
        """Steps that may be taken at once, before anything else, without any fault being missed; see the module.

        They change nothing that another process sees, and whatever else could happen now can happen after them with
        the same result: to connect and all that leads to being attached, and the arrival of what a grant needs or of
        the end of a session. What a repetition or a swap makes of the same arrival is among them. A layout is not,
        where an Announce that is sent later may overtake it. When no fault is left to come, the same holds for all that
        arrives at a reader.
        """
        hurry = self._hurry.get((number, calm))
        if hurry is None:
            side = self.table[number]
            hurry = self._hurry[number, calm] = [m for m in self._hurried(side, calm) if self._fits(m.side)]
        return hurry

    def _hurried(self, side: Side, calm: bool) -> list[Move]:
        link, reader = side.link, side.reader
        if not self.bound.reduced:
            return []
        if link is None:
            return self._application(side)
        if link.down and calm:
            return [m for m in self._down(side, link) if m.cost == FREE]
        if link.down and link.down[0] >= 0:  # a repetition may be a violation, and that is seen
            head = self.packets.message(link.down[0])
            quietly = isinstance(head, Joined) and reader.have == NOT_WAITING
            layout = isinstance(head, ManifestPart) and not (self.bound.swaps or self.bound.any_order)
            if head is None or quietly or layout or isinstance(head, Welcome | Segment):
                return self._down(side, link)
        if link.up and link.up[0] > 0 and isinstance(self.packets.message(link.up[0]), Hello | Join):
            return self._up(side, link)
        return []

    def _fits(self, number: int) -> bool:
        link = self.table[number].link if number >= 0 else None
        return link is None or max(sum(p > 0 for p in q) for q in (link.up, link.down)) <= self.bound.in_flight

    def answer(self, number: int, slot: int, sent: tuple[Packet, ...], ended: bool) -> int:
        """The publisher says something to one session, or ends it; -1: there is too much in flight."""
        key = (number, slot, sent, ended)
        answer = self._answers.get(key)
        if answer is None:
            side = self.table[number]
            link = side.link
            if link is not None and link.slot == slot:
                link = link._replace(down=link.down + sent)
                if ended:
                    link = link._replace(up=(), down=(*link.down, END), counted=ENDED)
                side = side._replace(link=link)
            elif ended:
                side = side._replace(old=tuple(old for old in side.old if old[0] != slot))
            answer = self._answers[key] = self.number(side)
            if not self._fits(answer):
                answer = self._answers[key] = -1
        return answer

    def publisher_dies(self, number: int) -> int:
        """The publisher is killed."""
        death = self._deaths.get(number)
        if death is None:
            side = self.table[number]._replace(old=())
            link = side.link
            if link is None and self.bound.other:
                side = side._replace(reader=outlive(side.reader))
            if link is not None:
                down = link.down if END in link.down else (*link.down, END)
                side = side._replace(link=link._replace(up=(), down=down, counted=DEAD))
            death = self._deaths[number] = self.number(side)
        return death

    # Moves

    def _step(self, side: Side, method: str, *args: object) -> ReaderStep | str:
        process = ReaderProcess(self.bound, self.packets, side.reader)
        try:
            accused = getattr(process, method)(*args) or ""
            return ReaderStep(process.freeze(), tuple(process.sent), accused)
        except Exception as error:  # also what a core does not expect is a fault
            return describe_error(error)

    def _stepped(self, side: Side, text: str, cost: int, method: str, *args: object, repeated: bool = False) -> Move:
        """A step of the reader's process alone."""
        step = self._step(side, method, *args)
        if isinstance(step, str):
            return Move(text, cost, fault=step)
        link = side.link
        assert link is not None, "only a session has something to receive or to say"
        if step.accused:
            if not repeated:
                return Move(text, cost, fault=f"an honest publisher is accused: {step.accused}")
            return self._ended(side, text, cost)
        up = link.up + step.sent if link.counted == COUNTED else link.up
        return Move(text, cost, self.number(side._replace(reader=step.state, link=link._replace(up=up))))

    def _ended(self, side: Side, text: str, cost: int, *, killed: bool = False) -> Move:
        """The reader's end of the session closes; what it maps stays mapped, and what was under way to it is gone."""
        link, old = side.link, side.old
        remnants = self._remnants(side)
        if link is not None and link.counted == COUNTED:
            old = tuple(sorted((*old, (link.slot, (*link.up, END)))))
        step = self._step(side, "end")
        assert isinstance(step, ReaderStep), step
        reader = ReaderState() if killed else step.state
        if self.bound.other:
            if link is not None and link.counted == DEAD:
                reader = outlive(reader)
            again = self.number(Side(reader))
            return Move(text, cost, self.number(Side(old=old, gone=True)), remnants, again=again)
        return Move(text, cost, self.number(Side(reader, None, old)), remnants)

    def _remnants(self, side: Side) -> Remnants:
        if side.link is None or side.link.counted == DEAD:
            return ()
        return tuple((m.segment, m.version) for m in side.reader.mappings)

    def _application(self, side: Side) -> list[Move]:
        reader, link = side.reader, side.link
        moves: list[Move] = []
        if side.gone:
            return moves
        if link is None:
            slot = min(set(range(SLOTS)) - {slot for slot, _ in side.old})
            step = self._step(side, "connect")
            assert isinstance(step, ReaderStep), step
            after = self.number(side._replace(reader=step.state, link=Link(slot, COUNTED, step.sent, ())))
            moves.append(Move("{r} connects", side=after, action=("connect", slot)))
            return moves
        moves += self._waiting(side)
        moves += [
            self._stepped(side, f"{{r}} lets go of version {m.version}", FREE, "release", m) for m in reader.mappings
        ]
        moves += [
            self._stepped(side, f"{{r}} lets go of its copy of version {version}", FREE, "release_spare", lease)
            for lease, version in reader.leases
            if lease in reader.spare
        ]
        if self.bound.copies:
            moves += [
                self._stepped(side, f"{{r}} copies version {m.version}", FREE, "copy", m) for m in reader.mappings
            ]
        if reader.mappings:
            fork = self._stepped(side, "{r} forks", SHIFT["forks"], "fork")
            moves.append(Move(fork.text, fork.cost, fork.side, self._remnants(side), fault=fork.fault))
        return moves

    def _waiting(self, side: Side) -> list[Move]:
        """An application begins to wait or stops waiting, or says what it uses."""
        if not side.reader.attached:
            return []
        unsaid = side.reader.acked < side.reader.granted  # nothing is kept of that where there are no acks
        said = f"{{r}} acknowledges version {side.reader.granted}"
        moves = [self._stepped(side, said, FREE, "ack")] if unsaid else []
        if side.reader.have != NOT_WAITING:
            return [*moves, self._stepped(side, "{r} stops waiting", SHIFT["withdrawals"], "withdraw")]
        if unsaid:
            moves.append(self._stepped(side, f"{said} and waits for a newer one", FREE, "ack_and_demand"))
        return [*moves, self._stepped(side, "{r} waits for a newer version", FREE, "demand")]

    def _deliveries(self, side: Side) -> list[Move]:
        link = side.link
        if link is None:
            return []
        return [*self._down(side, link), *self._up(side, link)]

    def _down(self, side: Side, link: Link) -> list[Move]:
        moves = []
        for i, cost, again in self._ways(link.down):
            packet, repeated = abs(link.down[i]), link.down[i] < 0
            after = side._replace(link=link._replace(down=_without(link.down, i, again)))
            text = f"{{r}} gets {self.packets.text(Packet(packet))}{_manner(i, again, repeated)}"
            if packet == END:
                moves.append(self._ended(after, text, cost))
            else:
                moves.append(self._stepped(after, text, cost, "receive", packet, repeated=repeated))
        return moves

    def _up(self, side: Side, link: Link) -> list[Move]:
        moves = []
        for i, cost, again in self._ways(link.up):
            packet, repeated = abs(link.up[i]), link.up[i] < 0
            after = side._replace(link=link._replace(up=_without(link.up, i, again)))
            text = f"the publisher gets {self.packets.text(Packet(packet))} of {{r}}{_manner(i, again, repeated)}"
            moves.append(Move(text, cost, self.number(after), (), ("receive", link.slot, packet), repeated=repeated))
        return moves

    def _ways(self, queue: tuple[Packet, ...]) -> list[tuple[int, int, bool]]:
        """Which message may be delivered next, what that costs, and whether it stays to be delivered again."""
        ways = [(0, FREE, False)] if queue else []
        if queue and queue[0] > 0:
            ways.append((0, SHIFT["repeats"], True))
        channels = [self.packets.channel(Packet(abs(packet))) for packet in queue]
        other = [i for i, channel in enumerate(channels) if channel != channels[0]]
        if other:
            ways.append((other[0], FREE if self.bound.any_order else SHIFT["swaps"], False))
        return ways

    def _old(self, side: Side) -> list[Move]:
        moves = []
        for i, (slot, up) in enumerate(side.old):
            rest = ((slot, up[1:]),) if up[1:] else ()
            after = self.number(side._replace(old=(*side.old[:i], *rest, *side.old[i + 1 :])))
            packet, repeated = abs(up[0]), up[0] < 0
            text = f"the publisher gets {self.packets.text(Packet(packet))} of an earlier session of {{r}}"
            moves.append(Move(text, side=after, action=("receive", slot, packet), repeated=repeated))
        return moves

    def _ends(self, side: Side) -> list[Move]:
        """Sessions are lost, readers are killed."""
        link, lost = side.link, SHIFT["lost_sessions"]
        moves = []
        if side.reader != ReaderState() or link is not None:
            moves.append(self._ended(side, "{r} is killed, and starts again", SHIFT["reader_crashes"], killed=True))
        if link is None or link.counted != COUNTED:
            return moves
        moves.append(self._ended(side, "{r} loses its session", lost))
        action = ("end", link.slot)
        text = "the publisher loses the session of {r}"
        moves.append(Move(text, lost, self.number(side), (), action))
        empty = side._replace(link=link._replace(down=()))
        if link.down:
            moves.append(Move(f"{text}, with all that was under way", lost, self.number(empty), (), action))
        return moves


def outlive(reader: ReaderState) -> ReaderState:
    """A reader without a session whose publisher is dead: the next one is another incarnation, as 1 again is not."""
    incarnation = OVER if reader.incarnation else 0
    last = (OVER, reader.last[1]) if reader.last[0] else reader.last
    return reader._replace(incarnation=incarnation, last=last)


def _without(queue: tuple[Packet, ...], i: int, again: bool) -> tuple[Packet, ...]:
    """What is left after a delivery. A repetition is due as long as the negative number of its message is there."""
    repetition = (Packet(-queue[i]),) if again else ()
    return (*queue[:i], *repetition, *queue[i + 1 :])


def _manner(i: int, again: bool, repeated: bool) -> str:
    later = ", which will be repeated" if again else ", repeated" if repeated else ""
    return f"{later}, which has overtaken what was sent before" if i else later
