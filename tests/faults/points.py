"""The steps of busync inside which a process can be made to die, stop, fork or exit: traps.

A trap wraps one function of the package in one child, before the child opens anything, and acts at its n-th call,
before or after it. So each fault of the table happens inside each step, and not only where chance puts it.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.page import Page, Slot

#: module:attribute. The steps of a publisher: claim, open, admit, grant, reserve, copy, commit, give back.
PUBLISHER = (
    "busync.transport.endpoint:_prepare_directory",
    "busync.transport.endpoint:_take_lock",
    "busync.transport.endpoint:_sweep",
    "busync.transport.endpoint:Claim.open_sockets",
    "busync.transport.endpoint:Claim.release",
    "busync.transport.board:Board.__init__",
    "busync.transport.board:Board.write",
    "busync.transport.board:Board.close",
    "busync.transport.bus:RouterBus.__init__",
    "busync.transport.bus:RouterBus.send",
    "busync.transport.bus:RouterBus.receive",
    "busync.transport.door:DoorListener.__init__",
    "busync.transport.door:DoorListener.accept",
    "busync.transport.door:DoorConnection.send",
    "busync.transport.door:DoorConnection.receive",
    "busync.transport.door:DoorPoll.add",
    "busync.transport.door:DoorPoll.discard",
    "busync.links:Links._accept",
    "busync.links:Links.close",
    "busync.links:Links._forget",
    "busync.links:Links._lose",
    "busync.server:Server._close",
    "busync.server:Server._time_passes",
    "busync.server:Server.carry_out",
    "busync.pool:Pool.create",
    "busync.pool:open_segment",
    "busync.pool:create_segment",
    "busync.pool:Pool.drop",
    "busync.pool:Pool.close",
    "busync.handles.memory:_map_shared",
    "busync.handles.layout:Plan.jobs",
    "busync.publishing:_commit",
    "busync.protocol.publisher:PublisherProtocol.reserve",
    "busync.protocol.publisher:PublisherProtocol.commit",
    "busync.protocol.publisher:PublisherProtocol.discard",
    "busync.protocol.publisher:PublisherProtocol.joined",
    "busync.protocol.publisher:PublisherProtocol.lost",
    "busync.protocol.ledger:Ledger.grant",
    "busync.protocol.ledger:Ledger.end_lease",
    "busync.protocol.ledger:Ledger.relieve",
    "busync.publisher:LoanBase._let_go",
)
#: The steps of a subscriber: connect, attach, ask, receive, map, build, copy, acknowledge, let go, end.
SUBSCRIBER = (
    "busync.session:door_connect",
    "busync.session:Session._connect_bus",
    "busync.holds:AttachedSegment.__init__",
    "busync.session:Session._receive",
    "busync.session:Session.say",
    "busync.session:Session.hold",
    "busync.session:Session.close",
    "busync.session:Session.before_fork",
    "busync.holds:Hold.own_memory",
    "busync.holds:AttachedSegment.readonly",
    "busync.session:check_segment",
    "busync.handles.private:map_private",
    "busync.holds:Hold.__init__",
    "busync.handles.build:TensorBuilder.build",
    "busync.handles.load:LoadPlan.run",
    "busync.snapshot:plan_load",
    "busync.snapshot:Snapshot._copy",
    "busync.snapshot:Snapshot.release",
    "busync.subscriber:Subscriber.acknowledge",
    "busync.asking:Asking._granted",
    "busync.asking:Asking._hand_over",
    "busync.asking:Asking._update_demand",
    "busync.attachment:Attachment.turn",
    "busync.attachment:Attachment.end",
    "busync.attachment:Attachment._open",
    "busync.transport.bus:DealerBus.__init__",
    "busync.transport.bus:DealerBus.send",
    "busync.transport.bus:DealerBus.receive",
    "busync.transport.bus:DealerBus.close",
    "busync.transport.board:BoardView.__init__",
    "busync.transport.board:BoardView.read",
    "busync.transport.door:DoorConnection.send",
    "busync.transport.door:DoorConnection.receive",
    "busync.transport.door:DoorConnection.flush",
    "busync.protocol.subscriber:SubscriberProtocol.ack",
    "busync.protocol.subscriber:SubscriberProtocol.demand",
)
#: They run under ``forks.fork_lock``, which no other thread can fork across, so nobody forks inside them.
NO_FORK_INSIDE = frozenset({
    "busync.transport.endpoint:_take_lock", "busync.transport.endpoint:_sweep", "busync.pool:open_segment",
    "busync.session:door_connect", "busync.handles.private:map_private", "busync.handles.memory:_map_shared",
    "busync.transport.board:Board.__init__", "busync.transport.door:DoorListener.__init__",
    "busync.transport.door:DoorListener.accept", "busync.session:Session.before_fork",
    "busync.transport.board:BoardView.__init__", "busync.session:Session.say",  # the first one, in the constructor
})  # fmt: skip
ACTIONS = ("SIGKILL", "SIGSTOP", "fork", "exit")


@dataclass(frozen=True, slots=True)
class Trap:
    """What happens inside which step of a child, at the how manieth time."""

    point: str
    action: str
    call: int
    after: bool

    def __str__(self) -> str:
        return f"{self.action} {'after' if self.after else 'before'} call {self.call} of {self.point}"


def find(point: str) -> tuple[Any, str]:
    """The owner and the name of a point's function.

    Raises:
        AttributeError: busync has no such function any more.
    """
    module_name, _, path = point.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def spring(trap: Trap, side: str, page: Page, forked: list[int]) -> None:
    """Set the trap in this process."""
    owner, name = find(trap.point)
    function: Callable[..., Any] = getattr(owner, name)
    calls, pid = 0, os.getpid()

    @functools.wraps(function)
    def trapped(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls == trap.call and not page[Slot.CALM] and os.getpid() == pid
        if mine and not trap.after:
            _act(trap.action, side, page, forked)
        result = function(*args, **named)
        if mine and trap.after:
            _act(trap.action, side, page, forked)
        return result

    setattr(owner, name, trapped)


def _act(action: str, side: str, page: Page, forked: list[int]) -> None:
    match action:
        case "SIGKILL":
            page.fault(f"{side}: SIGKILL inside a step")
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            page.fault(f"{side}: SIGSTOP inside a step, SIGCONT")
            page.add(Slot.STOPS)
            page[Slot.ASLEEP] = 1
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fork":
            page.fault(f"{side}: fork inside a step")
            pid = os.fork()
            if pid == 0:
                time.sleep(0.05)
                os._exit(0)
            forked.append(pid)
        case _:
            page.fault(f"{side}: exit inside a step")
            os._exit(0)
