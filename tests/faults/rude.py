"""A peer that asks and does not read: its queues fill up, and the publisher must get rid of it."""

from __future__ import annotations

import os
import select
import time
from typing import NoReturn

from busync.errors import BusyncError
from busync.transport.bus import DealerBus
from busync.transport.door import DoorConnection, door_connect
from busync.transport.endpoint import Endpoint
from busync.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Abandon,
    Announce,
    Hello,
    Join,
    Want,
    Welcome,
    Withdraw,
    decode_bus_down,
    decode_door_down,
    encode,
)
from tests.faults.child import Child
from tests.faults.page import Slot

PATIENCE = 2.5  #: seconds that the peer goes on


class Rude(Child):
    """kind "bus": takes thousands of grants and reads none; "door": abandons them, so that new segments are pushed."""

    def live(self) -> NoReturn:
        self.op("rude", self._fill)
        os._exit(0)

    def _fill(self) -> None:
        endpoint = Endpoint.resolve(self.part.endpoint)
        stop_at = time.monotonic() + 2
        while (knocked := self._knock(endpoint)) is None:  # the publisher may have to come first
            if time.monotonic() > stop_at:
                return
            time.sleep(0.01)
        door, welcome = knocked
        bus = DealerBus(endpoint.bus_path, welcome.token, MAX_MESSAGE_BYTES)
        try:
            self._ask(door, bus)
        finally:
            door.close()
            bus.close()

    def _knock(self, endpoint: Endpoint) -> tuple[DoorConnection, Welcome] | None:
        try:
            door = door_connect(endpoint.door_path)
            door.send(encode(Hello(wire=WIRE_VERSION, topic=self.part.topics[0], name="rude")))
            welcome = self._welcome(door)
        except (OSError, EOFError, BusyncError):
            return None
        return None if welcome is None else (door, welcome)

    def _ask(self, door: DoorConnection, bus: DealerBus) -> None:
        bus.send(encode(Join()))
        self.page.fault(f"subscriber: {self.part.kind} not read")
        self.page.add(Slot.OPENED)
        time.sleep(0.02)
        stop_at, number = time.monotonic() + PATIENCE, 0
        while time.monotonic() < stop_at:
            number += 1
            door.send(encode(Want(number=number, have=0, digest=False)))
            if self.part.kind == "door":
                time.sleep(0.002)
                while (data := bus.receive()) is not None:
                    message = decode_bus_down(data)
                    if isinstance(message, Announce):
                        door.send(encode(Abandon(leases=(message.lease,))))
            door.send(encode(Withdraw(number=number)))
            if door.pending > 100:  # the publisher is slower
                time.sleep(0.001)
                door.flush()
            if number % 50 == 0 and self._ended(door):
                self.page.add(Slot.FULL)
                return
            self.page[Slot.SINCE] = time.monotonic_ns()

    @staticmethod
    def _welcome(door: DoorConnection) -> Welcome | None:
        stop_at = time.monotonic() + 1
        while time.monotonic() < stop_at:
            packet = door.receive()
            if packet is not None:
                message = decode_door_down(packet.data)
                return message if isinstance(message, Welcome) else None
            time.sleep(0.001)
        return None

    @staticmethod
    def _ended(door: DoorConnection) -> bool:
        poll = select.poll()
        poll.register(door.fileno(), 0)
        return bool(poll.poll(0))
