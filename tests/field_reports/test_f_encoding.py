"""Received bytes are data: pickles, limits, cut messages, names, revisions (B96, B97, B98, B99, B101)."""

from __future__ import annotations

import ast
import asyncio
import enum
import os
import pickle
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import pytest
import torch

import busync
from busync import blocking, server, session, wire
from busync.errors import DecodeError, ExportError, ViolationError
from busync.ids import Version
from busync.manifest import GroupSpec, TensorSpec, make_manifest
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.transport.board import Board
from busync.transport.bus import DealerBus, RouterBus
from busync.transport.door import DoorConnection, DoorListener, door_connect
from busync.transport.endpoint import Endpoint
from busync.wire import Hello, ManifestPart, Refuse, Welcome, decode_bus_down, decode_door_down, encode, manifest_parts
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.roles import wait_until
from tests.test_wire import DECODERS, SAMPLES, tree_of

LONG = bool(os.environ.get("BUSYNC_LONG"))
SMALL = patterns.SMALL
WIRE, SOURCE = "busync/wire.py", "busync/handles/source.py"

MUTANTS = {
    "test_b96_pickles_are_never_run_in_any_role": tuple(
        Mutant(
            WIRE, f"        if len(data) > {limit}:\n",
            "        if data[:1] == b'\\x80':\n            import pickle\n\n            pickle.loads(data)\n"
            f"        if len(data) > {limit}:\n",
            "whatever looks like a pickle is unpickled, and what it is is checked later",
        )
        for limit in ("max_bytes", "MAX_PACKET_BYTES")
    ),
    "test_b96_no_code_executes_what_was_received": Mutant(
        WIRE, "import msgpack\n", "import marshal\n\nimport msgpack\n",
        "a module that executes, or trusts, what it reads is within reach of received bytes",
    ),
    "test_b97_a_very_large_manifest_works": Mutant(
        WIRE, "PART_TENSORS = 512 ", "PART_TENSORS = 1 << 20 ",
        "a manifest is one message, which meets the limit of a message",
    ),
    "test_b97_absurd_lengths_are_refused_without_allocating": (
        Mutant(
            "busync/transport/bus.py", "            self._sock.setsockopt(zmq.MAXMSGSIZE, _MAX_JOIN_BYTES)\n", "",
            "a frame may be as long as its header says",
        ),
        Mutant(
            WIRE, "max_array_len=max_items,", "max_array_len=1 << 30,",
            "memory for an array is taken because its header says so",
        ),
    ),
    "test_b98_cut_prolonged_or_doubled_bytes_are_an_error": Mutant(
        WIRE, "            message = msgspec.convert(tree, kind)\n",
        "            message = msgspec.convert(tree, kind)\n"
        "        except msgpack.ExtraData as extra:\n            message = msgspec.convert(extra.unpacked, union)\n",
        "what follows a message is dropped without a word",
    ),
    "test_b98_a_manifest_with_a_part_missing_is_never_a_shorter_one": Mutant(
        "busync/protocol/subscriber.py", "        if part.part != expected or not same:\n", "        if not same:\n",
        "a manifest may lack a part",
    ),
    "test_b99_bad_names_are_refused_by_the_sender": (
        Mutant(
            SOURCE, "if not isinstance(key, str) or not key:", "if key is None:",
            "keys that are no text are turned into text",
        ),
        Mutant(
            SOURCE, "if name in flat.tensors or name in flat.values:", "if False:",
            "the second of two entries with one name replaces the first",
        ),
        Mutant(
            SOURCE, "if type(value) is int and not -(1 << 63) <= value < 1 << 64:", "if False:",
            "a number that does not fit is noticed when it is sent",
        ),
    ),
    "test_b99_odd_names_arrive_exactly": Mutant(
        SOURCE, "        name = prefix + key  #", "        name = f\"{prefix}{key}\"  #",
        "a key of a class derived from str is named after what it prints",
    ),
    "test_b101_a_later_minor_revision_is_understood": Mutant(
        WIRE, 'class Message(Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):',
        'class Message(\n    Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower, '
        "forbid_unknown_fields=True\n):",
        "a field that a later revision adds ends the session",
    ),
    "test_b101_another_major_revision_is_refused_at_attach": (
        Mutant(
            "busync/protocol/publisher.py", "if hello.wire != WIRE_VERSION:", "if False:",
            "a subscriber of another revision is admitted",
        ),
        Mutant(
            "busync/protocol/subscriber.py", "if message.wire != WIRE_VERSION:", "if False:",
            "a publisher of another revision is attached to",
        ),
    ),
}  # fmt: skip


# Raw peers


class RawSubscriber:
    """Whoever connects to a publisher and says what it likes."""

    def __init__(self, where: Endpoint, *, greet: bool = True) -> None:
        self._where = where
        self.door: DoorConnection = door_connect(where.door_path)
        self.bus: DealerBus | None = None
        if greet:
            self.door.send(encode(Hello(wire=wire.WIRE_VERSION, topic="default", name="raw")))
            welcome = self.hear()
            assert isinstance(welcome, Welcome)
            self.bus = DealerBus(where.bus_path, welcome.token, 1 << 20)

    def hear(self) -> Any:
        """What is said at the door next; None at its end."""
        packets: list[Any] = []

        def heard() -> bool:
            try:
                packet = self.door.receive()
            except EOFError:
                packets.append(None)
                return True
            if packet is None:
                return False
            for fd in packet.fds:
                fd.close()
            packets.append(decode_door_down(packet.data))
            return True

        wait_until(heard, what="a word from the publisher")
        return packets[0]

    def close(self) -> None:
        self.door.close()
        if self.bus is not None:
            self.bus.close()


class RawPublisher:
    """Whoever serves an endpoint and says what it likes."""

    def __init__(self, name: str) -> None:
        self.claim = Endpoint.resolve(name).claim()
        self.listener = DoorListener(self.claim.endpoint.door_path)
        self.bus = RouterBus(self.claim.endpoint.bus_path)
        self.board = Board(7)
        self.doors: list[DoorConnection] = []

    def accept(self) -> DoorConnection:
        found: list[DoorConnection] = []

        def accepted() -> bool:
            found.extend(filter(None, [self.listener.accept()]))
            return bool(found)

        wait_until(accepted, what="a subscriber")
        self.doors += found
        wait_until(lambda: found[0].receive() is not None, what="Hello")
        return found[0]

    def close(self) -> None:
        for door in self.doors:
            door.close()
        self.listener.close()
        self.bus.close()
        self.board.close()
        self.claim.release()


@pytest.fixture
def raw_publisher() -> Iterator[RawPublisher]:
    made = RawPublisher("p")
    yield made
    made.close()


# B96: pickles


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def payloads(marker: Path) -> list[bytes]:
    """Pickles, raw and in the binary fields of messages that are otherwise in order."""
    raw = [pickle.dumps(Bomb(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    wrapped = [tree_of(message) | {"extra": raw[-1]} for message in SAMPLES.values()]
    fields = [tree_of(SAMPLES[wire.Announce]) | {"values": {"v": raw[-1]}, "layout": raw[-1][:16]}]
    return [*raw, *map(msgpack.packb, [*wrapped, *fields]), msgpack.packb(raw[-1]), msgpack.packb({b"type": raw[2]})]


def malformed(data: bytes, channel: str) -> bool:
    """Whether a publisher must refuse it. (ZeroMQ cuts off whoever sends more than a Join can be.)"""
    if channel == "bus" and len(data) > 256:
        return False
    try:
        (wire.decode_door_up if channel == "door" else wire.decode_bus_up)(data)
    except DecodeError:
        return True
    return False


def test_b96_pickles_are_never_run_in_any_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw_publisher: RawPublisher
) -> None:
    """A pickle on any socket of any role leaves no mark: the peer is dropped with one log line, and service goes on."""
    marker = tmp_path / "marker"
    with blocking.Publisher("q") as pub, blocking.Subscriber("q") as sub:
        for version, bad in enumerate(payloads(marker), 1):
            for channel in ("door", "bus"):
                caplog.clear()
                peer = RawSubscriber(pub.endpoint)
                if channel == "door":
                    peer.door.send(bad)
                else:
                    assert peer.bus is not None
                    peer.bus.send(bad)
                if malformed(bad, channel):
                    refused = peer.hear()
                    assert isinstance(refused, Refuse)
                    assert refused.code == "protocol"
                    assert caplog.text.count("not a valid message") == 1
                peer.close()
            pub.publish(patterns.state(1, version, SMALL))
            assert sub.next(timeout=5).version == version
    assert not marker.exists()

    async def attach() -> None:
        with pytest.raises(busync.PublisherLost, match="not a valid message"):
            async with busync.Subscriber("p", connect_timeout=0.15):
                pass

    def serve(bad: bytes, channel: str) -> None:
        door = raw_publisher.accept()
        if channel == "door":
            door.send(bad)
            return
        token = os.urandom(16)
        welcome = Welcome(wire=wire.WIRE_VERSION, incarnation=7, token=b"t" + token[1:], slot=1, max_held=2)
        door.send(encode(welcome), raw_publisher.board.fd)
        wait_until(lambda: raw_publisher.bus.receive() is not None, what="Join")
        raw_publisher.bus.send(welcome.token, bad)

    async def both(bad: bytes, channel: str) -> None:
        serving = asyncio.create_task(asyncio.to_thread(serve, bad, channel))
        await attach()
        await serving

    for bad in payloads(marker)[4:8]:
        for channel in ("door", "bus"):
            asyncio.run(both(bad, channel))
            while (late := raw_publisher.listener.accept()) is not None:
                late.close()
    assert not marker.exists()


FORBIDDEN = {"marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml", "joblib", "imp", "runpy"}
CALLS = {"recv_pyobj", "send_pyobj", "loads", "Unpickler"}
BUILTINS = {"eval", "exec", "compile", "__import__"}


def test_b96_no_code_executes_what_was_received() -> None:
    """Nothing in the package unpickles, evaluates or imports by name. Files of weights are read as weights only."""
    root = Path(busync.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name.split(".")[0] for a in node.names} | {getattr(node, "module", None) or ""}
                assert not names & FORBIDDEN, where
                assert "pickle" not in names or path.name == "checkpoints.py", where  # for its errors' class alone
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in (BUILTINS if isinstance(node.func, ast.Name) else CALLS), where
                if name == "load" and ast.unparse(node.func) == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), where


# B97: limits


def test_b97_a_very_large_manifest_works() -> None:
    """30,000 tensors with names of 120 characters are several MiB of manifest, and an ordinary version."""
    count = 30_000 if LONG else 12_000
    source = {f"{i:06}." + "n" * 113: torch.tensor(float(i)) for i in range(count)}
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(source)
        snapshot = sub.next(timeout=20)
        parts = [encode(part) for part in manifest_parts(snapshot.manifest, 1)]
        assert sum(map(len, parts)) > 130 * count
        assert max(map(len, parts)) < wire.MAX_MESSAGE_BYTES / 8
        assert list(snapshot.tensors) == list(source)
        assert [float(snapshot.tensors[name]) for name in list(source)[::997]] == [
            float(i) for i in range(0, count, 997)
        ]


def test_b97_absurd_lengths_are_refused_without_allocating(runtime_dir: Path) -> None:
    """What claims to be 4 GiB is refused by its header, on every channel, and costs nothing."""
    headers = [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\x81\xa4type\xdd", b"\xc9"]
    tracemalloc.start()
    try:
        for header in headers:
            for decode in DECODERS:
                for size in (b"\xff\xff\xff\xff", b"\x00\x7f\xff\xff"):
                    for body in (b"", bytes(200), (header + size) * 40):
                        with pytest.raises(DecodeError):
                            decode(header + size + body)
        for decode in DECODERS:
            with pytest.raises(DecodeError):
                decode(b"\xdd\x00\x00\x80\x00" * 1000 + bytes(32_000 - 5000))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        with socket.socket(socket.AF_UNIX) as stranger:  # speaks ZeroMQ's own protocol
            stranger.connect(pub.endpoint.bus_path)
            stranger.settimeout(5)
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
            ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
            greeting = b""
            while len(greeting) < 64:  # libzmq sends the rest of it once it has seen ours
                more = stranger.recv(64 - len(greeting))
                assert more, "it hung up"
                greeting += more
            stranger.sendall(b"\x02" + struct.pack(">Q", 4 << 30) + b"x" * 1000)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        pub.publish(patterns.state(1, 1, SMALL))
        assert sub.next(timeout=5).version == 1


# B98: cut messages


def big_manifest(count: int) -> Any:
    """Of tensors that are all tied, so that each part on its own is in order."""
    tensors = tuple(TensorSpec(f"layer.{i}", "float32", (4, 4), (4, 1), 0, 0, True, True) for i in range(count))
    return make_manifest(64, (GroupSpec(0, 64),), tensors)


def test_b98_cut_prolonged_or_doubled_bytes_are_an_error() -> None:
    """A manifest that is cut anywhere, followed by anything, or doubled is an error, and never a shorter manifest."""
    part = encode(manifest_parts(big_manifest(300), 7)[0])
    assert isinstance(decode_bus_down(part), ManifestPart)
    step = 1 if LONG else 37
    cuts = [part[:length] for length in {*range(0, len(part), step), *range(40), *range(len(part) - 40, len(part))}]
    for bad in [*cuts, part + b"\0", part + b"\xc0", part + b"\xc1", part + part, part + part[:50], b"\xc0" + part]:
        with pytest.raises(DecodeError):
            decode_bus_down(bad)


def test_b98_a_manifest_with_a_part_missing_is_never_a_shorter_one() -> None:
    """Parts that are missing, repeated, exchanged or of two manifests end the session; nothing is handed over."""
    parts = manifest_parts(big_manifest(1800), 7)
    other = manifest_parts(big_manifest(1500), 7)
    announce = wire.Announce(
        incarnation=7, number=1, lease=1, version=1, layout=parts[0].layout, segment=1, label="", published_at=0.0,
        values={},
    )  # fmt: skip

    def receive(given: list[ManifestPart]) -> list[Any]:
        core = SubscriberProtocol("default", "r")
        core.start()
        core.receive_door(Welcome(wire=wire.WIRE_VERSION, incarnation=7, token=b"t" * 16, slot=1, max_held=2))
        core.receive_bus(wire.Joined(incarnation=7))
        core.demand(Version(0))
        core.receive_door(wire.Segment(incarnation=7, segment=1, nbytes=64 * 2048))
        for part in given:
            core.receive_bus(part)
        core.receive_bus(announce)
        return [effect for effect in core.take_effects() if isinstance(effect, fx.Granted)]

    (granted,) = receive(parts)
    assert len(granted.manifest.tensors) == 1800
    for bad in (
        parts[:-1], parts[1:], [parts[0], *parts[2:]], [parts[0], parts[0], *parts[1:]], [*parts, parts[-1]],
        parts[::-1], [parts[0], other[1], *parts[2:]], [*parts[:-1], other[-1]], other, [],
    ):  # fmt: skip
        with pytest.raises(ViolationError):
            receive(bad)


# B99: names

TENSOR = torch.ones(2)


class Letter(str, enum.Enum):  # noqa: UP042  # its text differs from what it prints
    A = "a"


class Loud(str):
    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "loud"

    __str__ = __repr__ = lambda self: "loud"


BAD: dict[str, tuple[Any, str]] = {
    "integer": ({"a": {1: TENSOR}}, r"a\.1"), "tuple": ({("a", 1): TENSOR}, r"\('a', 1\)"),
    "bytes": ({b"w": TENSOR}, "b'w'"), "none": ({None: TENSOR}, "None"), "float": ({1.5: TENSOR}, "1.5"),
    "bool": ({"x": {True: 3}}, r"x\.True"), "empty": ({"": TENSOR}, "''"),
    "empty inside": ({"a": {"": TENSOR}}, r"'a\.'"),
    "twice": ({"a.b": TENSOR, "a": {"b": TENSOR}}, r"'a\.b'"), "a value twice": ({"a": [1], "a.0": 2}, r"'a\.0'"),
    "in pairs twice": ([("w", TENSOR), ("w", TENSOR)], "'w'"),
    "value and tensor": ({"a.b": 1, "a": {"b": TENSOR}}, r"a\.b"),
    "surrogate": ({"\ud800": TENSOR}, "ud800"), "nul": ({"a\0b": TENSOR}, "x00"), "line": ({"a\nb": 1}, "a.nb"),
    "10,000 letters": ({"n" * 10_000: TENSOR}, "nnn"), "too long in UTF-8": ({"ä" * 513: TENSOR}, "äää"),
    "beyond 64 bits": ({"w": TENSOR, "n": 1 << 64}, "'n'"), "below 64 bits": ({"n": -(1 << 63) - 1}, "'n'"),
    "text without UTF-8": ({"t": "\udfff"}, "'t'"), "a set": ({"s": {1}}, "'s'"), "a class": ({"c": int}, "'c'"),
    "a bytearray": ({"b": bytearray(3)}, "'b'"), "too much": ({"b": bytes(2 << 20)}, "'b'"),
}  # fmt: skip


def test_b99_bad_names_are_refused_by_the_sender() -> None:
    """A name or value that cannot arrive as it is is refused where it is published, by name; readers see nothing."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        for what, (source, name) in BAD.items():
            with pytest.raises(ExportError, match=name) as caught:
                pub.publish(source)
            assert caught.value.name or what == "empty"
            assert len(str(caught.value)) < 12_000
        assert sub.version == 0
        assert pub.publish({"w": TENSOR}).version == 1
        assert sub.next(timeout=5).version == 1
        assert sub.connected


def test_b99_odd_names_arrive_exactly() -> None:
    """What is accepted arrives as it was: names and values, to the last bit."""
    names = [
        "a",
        "a.b",
        " ",
        "'",
        "é",
        "e\u0301",
        "ß",
        "名前",
        "🙂",
        "__proto__",
        "a/b",
        "n" * 1024,
        "ä" * 512,
        ".",
        "..",
    ]
    source: dict[Any, Any] = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
    del source["a"], source["a.b"]
    source |= {Letter.A: {Loud("b"): TENSOR}} | {"values": {Loud("c"): 1}}
    values = {
        "big": (1 << 64) - 1, "small": -(1 << 63), "inf": float("inf"), "tiny": 5e-324, "minus": -0.0, "yes": True,
        "one": 1, "none": None, "text": "é🙂\0", "bytes": bytes(range(256)), "empty": "", "void": b"",
    }  # fmt: skip
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(source | values)
        snapshot = sub.next(timeout=5)
        assert set(snapshot.tensors) == {*names[2:], "a.b"}
        for index, name in enumerate(names[2:], 2):
            assert float(snapshot.tensors[name]) == index
        assert snapshot.values == {**values, "values.c": 1}
        assert {name: type(value) for name, value in snapshot.values.items() if name in values} == {
            name: type(value) for name, value in values.items()
        }
        assert str(snapshot.values["minus"]) == "-0.0"


# B101: revisions


def later(message: wire.Message) -> bytes:
    """A message as a later minor revision may send it: every map has more fields, every spec more at its end."""

    def extend(node: Any) -> Any:
        if isinstance(node, dict):
            return {**node, "zz_later": [1, {"deep": b"x"}], "zz_more": None}
        return node

    tree = extend(tree_of(message))
    for name in ("groups", "tensors"):
        if name in tree:
            tree[name] = [[*spec, "later", None] for spec in tree[name]]
    packed: bytes = msgpack.packb(tree)
    return packed


@pytest.mark.parametrize("newer", ["publisher", "subscriber"])
def test_b101_a_later_minor_revision_is_understood(newer: str) -> None:
    """Fields that this revision does not know are ignored in every message, in both directions."""
    module = server if newer == "publisher" else session
    with (
        mock.patch.object(module, "encode", later),
        blocking.Publisher("p") as pub,
        blocking.Subscriber("p", name="r", digests=True) as sub,
    ):
        for version in range(1, 8):
            pub.publish(patterns.state(1, version))
            snapshot = sub.next(timeout=5)
            patterns.check(snapshot.tensors, 1, version)
            assert snapshot.digest(5) == busync.content_digest(snapshot.tensors)
            snapshot.ack()
            pub.wait(version, timeout=5)
        assert pub.status()["subscribers"][0]["version"] == 7


@pytest.mark.parametrize("theirs", [0, wire.WIRE_VERSION - 1, wire.WIRE_VERSION + 1, 1 << 40])
def test_b101_another_major_revision_is_refused_at_attach(theirs: int, raw_publisher: RawPublisher) -> None:
    """Another wire version is refused when it attaches, by whichever side sees it, with both numbers."""
    numbers = f"wire version {wire.WIRE_VERSION}, the peer {theirs}"
    with blocking.Publisher("q") as pub:
        peer = RawSubscriber(pub.endpoint, greet=False)
        peer.door.send(encode(Hello(wire=theirs, topic="default", name="later")))
        refused = peer.hear()
        assert isinstance(refused, Refuse)
        assert refused.code == "wire-version"
        assert numbers in refused.text
        assert peer.hear() is None
        peer.close()
        assert pub.status()["subscribers"] == []

    def serve() -> None:
        welcome = Welcome(wire=theirs, incarnation=7, token=b"t" * 16, slot=1, max_held=2)
        raw_publisher.accept().send(encode(welcome), raw_publisher.board.fd)

    async def attach() -> None:
        serving = asyncio.create_task(asyncio.to_thread(serve))
        with pytest.raises(busync.RefusedError, match=numbers) as caught:
            async with busync.Subscriber("p", connect_timeout=5):
                pass
        assert caught.value.code == "wire-version"
        await serving

    asyncio.run(attach())
