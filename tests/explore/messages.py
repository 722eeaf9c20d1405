"""Messages as the queues of a state hold them: small numbers for the bytes that the real codec makes.

A lease is called by the number of the Want that it answers, which is unique within its session. So nothing that a
reader keeps or that is under way depends on how many sessions there were before.
"""

from __future__ import annotations

from typing import Final, NewType

from busync.wire import (
    BusDown,
    DoorDown,
    DoorUp,
    Join,
    decode_bus_down,
    decode_bus_up,
    decode_door_down,
    decode_door_up,
    encode,
)

Packet = NewType("Packet", int)
END: Final = Packet(0)  #: the door ended
DOOR, BUS = 0, 1
Down = DoorDown | BusDown


class Packets:
    """The table of all messages that were ever sent. Equal messages have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bool, bytes], Packet] = {}
        self._messages: list[tuple[int, DoorUp | Join | Down | None]] = [(DOOR, None)]
        self._up = [False]

    def up(self, message: DoorUp | Join) -> Packet:
        """A message to the publisher."""
        return self._number(BUS if isinstance(message, Join) else DOOR, True, encode(message))

    def down(self, message: Down, channel: int) -> Packet:
        """A message to a reader. An Announce may take either way."""
        return self._number(channel, False, encode(message))

    def again(self, message: DoorUp | Join | Down, like: Packet) -> Packet:
        """A message that goes the way of another one."""
        return self._number(self.channel(like), self._up[like], encode(message))

    def _number(self, channel: int, up: bool, data: bytes) -> Packet:
        key = (channel, up, data)
        number = self._numbers.get(key)
        if number is None:
            decode = {
                (DOOR, True): decode_door_up, (BUS, True): decode_bus_up,
                (DOOR, False): decode_door_down, (BUS, False): decode_bus_down,
            }[channel, up]  # fmt: skip
            number = self._numbers[key] = Packet(len(self._messages))
            self._messages.append((channel, decode(data)))
            self._up.append(up)
        return number

    def channel(self, packet: Packet) -> int:
        """DOOR or BUS."""
        return self._messages[packet][0]

    def message(self, packet: Packet) -> DoorUp | Join | Down | None:
        """What was sent; None for END."""
        return self._messages[packet][1]

    def text(self, packet: Packet) -> str:
        """For people."""
        message = self.message(packet)
        if message is None:
            return "the end of the door"
        shown = {"number", "have", "lease", "leases", "released", "version", "segment", "segments"}
        fields = [f"{name}={getattr(message, name)}" for name in message.__struct_fields__ if name in shown]
        return f"{type(message).__name__}({', '.join(fields)})"
