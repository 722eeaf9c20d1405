"""Where publishers are found: names, paths, rights, second publishers, restarts (B79, B80, B81, B83, B95)."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import busync
from busync import blocking
from busync.transport.endpoint import Endpoint
from tests.forking import check_in_child
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import wait_until

ENDPOINT = "busync/transport/endpoint.py"
SMALL = patterns.SMALL
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user id")

MUTANTS = {
    "test_b79_every_path_works_or_is_refused_by_limit_and_path": Mutant(
        ENDPOINT, "MAX_SOCKET_PATH_BYTES = 107 ", "MAX_SOCKET_PATH_BYTES = 120 ",
        "a path that is too long fails obscurely when it is bound, and not when it is named",
    ),
    "test_b79_names_that_differ_at_their_end_never_meet": Mutant(
        ENDPOINT, "os.path.join(runtime, path), runtime", "os.path.join(runtime, path[:40]), runtime",
        "names are cut to fit, so that long ones meet",
    ),
    "test_b80_a_second_publisher_is_refused_and_disturbs_nobody": Mutant(
        ENDPOINT, "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "two publishers may hold one endpoint, and the second takes the sockets away",
    ),
    "test_b81_two_jobs_with_default_settings": (
        Mutant(
            ENDPOINT, 'return f"/tmp/busync-{os.geteuid()}"', 'return "/tmp/busync"',
            "all users of a machine share one default directory",
        ),
        Mutant(
            ENDPOINT, "os.path.join(os.path.abspath(session), \"busync\")", '"/tmp/busync-0"',
            "the runtime directory of the login session is not used",
        ),
    ),
    "test_b81_what_somebody_else_left_is_named_with_a_remedy": Mutant(
        ENDPOINT, "if owners is not None and found.st_uid not in owners:", "if owners is None:",
        "a directory of somebody else is used, who can then put anything there",
    ),
    "test_b83_nothing_is_looser_at_any_instant": Mutant(
        ENDPOINT, "    try:\n        os.mkdir(path, 0o700)\n    except FileExistsError:",
        "    try:\n        os.mkdir(path, 0o777)\n    except FileExistsError:",
        "a directory has the rights of the umask until they are changed",
    ),
    "test_b83_a_directory_that_others_may_write_to_is_refused": Mutant(
        ENDPOINT, "_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH", "_WRITABLE_BY_OTHERS = stat.S_IWOTH",
        "the group of a directory may replace the sockets in it",
    ),
    "test_b83_other_users_are_refused": Mutant(
        "busync/links.py", "door.peer.uid not in self._options.allow_uids:", "False:",
        "whoever can reach the sockets may subscribe",
    ),
    "test_b95_readers_follow_a_publisher_that_starts_again": Mutant(
        "busync/protocol/subscriber.py",
        "self.incarnation, self.adopted = Incarnation(message.incarnation), NO_VERSION",
        "self.incarnation = Incarnation(message.incarnation)",
        "versions of a new publisher are compared with those of the old one",
    ),
    "test_b95_a_publisher_whose_directory_was_taken_leaves_its_successor_alone": Mutant(
        ENDPOINT, "if self._is_ours():", "if True:",
        "the sockets of whoever has the path now are removed",
    ),
}  # fmt: skip


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def adopts(endpoint: str | os.PathLike[str], seed: int) -> None:
    """A new reader of the endpoint gets the first version of the publisher with this seed."""
    with blocking.Subscriber(endpoint, connect_timeout=5) as sub:
        patterns.check(sub.next(timeout=5).tensors, seed, 1, SMALL)


# B79: the path is too long


def test_b79_every_path_works_or_is_refused_by_limit_and_path(runtime_dir: Path) -> None:
    """Either both ends work, or both refuse the name at once, with the limit, the path and a remedy."""
    deep = runtime_dir / ("d" * 150)
    room = 107 - len(str(runtime_dir)) - len("//door")
    for where in (deep, f"ipc://{deep}", "ä" * 60, "x" * (room + 1), "x" * 90 + "1", "ä" * (room // 2 + 1)):
        for end in (busync.Publisher, busync.Subscriber, blocking.Publisher, blocking.Subscriber):
            with pytest.raises(busync.EndpointError, match=r"more than the 107.*BUSYNC_RUNTIME_DIR") as caught:
                end(where)
            assert str(Endpoint("", str(runtime_dir), None).directory) in str(caught.value)
    for name in ("x" * room, "ä" * (room // 2), "€" * (room // 3), "a b\n'$(x)"):
        with blocking.Publisher(name) as pub:
            pub.publish(patterns.state(1, 1, SMALL))
            adopts(name, 1)
        shutil.rmtree(runtime_dir / name)


def test_b79_names_that_differ_at_their_end_never_meet(cast: Cast, runtime_dir: Path) -> None:
    """Two ends that start independently derive the same path from the same name, and another from another."""
    room = 107 - len(str(runtime_dir)) - len("//door")
    with ExitStack() as stack:
        names = ["y" * (room - 1) + last for last in "ab"]
        for seed, name in enumerate(names, 1):
            pub = stack.enter_context(blocking.Publisher(name))
            pub.publish(patterns.state(seed, 1, patterns.SHAPES), label=str(seed))
        for seed, name in enumerate(names, 1):
            reader = cast.subscriber(name)
            assert reader.call("next")[:2] == (1, str(seed))
            assert reader.call("keep") > 0


# B80: a second publisher


def test_b80_a_second_publisher_is_refused_and_disturbs_nobody(cast: Cast) -> None:
    """A name has one publisher. Another is refused by pid; after a SIGKILL the next one needs no cleaning up."""
    first = cast.publisher("x")
    old = cast.subscriber("x", name="old")
    for attempt in range(3):
        second = cast.begin("PublisherRole", "x", {})
        with pytest.raises(busync.EndpointInUse, match=f"in use by pid {first.pid}.*another name"):
            second.finish()
        second.kill()
        assert first.call("publish")["version"] == attempt + 1
        assert old.call("next")[0] == attempt + 1
        late = cast.subscriber("x", "uvloop", name=f"late-{attempt}")
        assert late.call("next")[0] == attempt + 1
        assert late.call("keep") > 60_000
        late.stop()
    first.kill()
    third = cast.publisher("x")
    third.call("publish")
    assert old.call("next")[::2] == (1, third.call("incarnation"))


# B81: two jobs, two users


def test_b81_two_jobs_with_default_settings(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    """Defaults are private to the user. Jobs with a directory of their own never meet; others are told by whom."""
    with blocking.Publisher("policy") as one:
        one.publish(patterns.state(1, 1, SMALL))
        with pytest.raises(busync.EndpointInUse, match=f"by pid {os.getpid()}.*another name"):
            blocking.Publisher("policy").__enter__()
        monkeypatch.setenv("BUSYNC_RUNTIME_DIR", str(runtime_dir / "job"))
        with blocking.Publisher("policy") as two:
            two.publish(patterns.state(2, 1, SMALL))
            adopts("policy", 2)
        monkeypatch.setenv("BUSYNC_RUNTIME_DIR", str(runtime_dir))
        adopts("policy", 1)
    monkeypatch.delenv("BUSYNC_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir / "login"))
    assert Endpoint.resolve("policy").directory == str(runtime_dir / "login" / "busync" / "policy")
    with blocking.Publisher("policy") as three:
        three.publish(patterns.state(3, 1, SMALL))
        adopts("policy", 3)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    for uid in (os.geteuid(), 12345):
        monkeypatch.setattr("busync.transport.endpoint.os.geteuid", lambda uid=uid: uid)
        assert Endpoint.resolve("policy").directory == f"/tmp/busync-{uid}/policy"


@as_root
def test_b81_what_somebody_else_left_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    """What belongs to another user, or cannot be written to, is a typed error with the path and a way out."""
    squatted = runtime_dir / "squatted"
    (squatted / "policy").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("BUSYNC_RUNTIME_DIR", str(squatted))
    for path, remedy in ((squatted / "policy", "another name"), (squatted, "set BUSYNC_RUNTIME_DIR")):
        os.chown(path, 12345, 12345)
        for end in (blocking.Publisher("policy"), blocking.Subscriber("policy")):
            with pytest.raises(busync.EndpointError, match=f"{path} belongs to uid 12345.*{remedy}"):
                end.__enter__()
        os.chown(path, os.geteuid(), os.getegid())
    runtime_dir.chmod(0o755)
    monkeypatch.setenv("BUSYNC_RUNTIME_DIR", str(runtime_dir / "new"))

    def as_another_user() -> None:
        os.setuid(12345)
        with pytest.raises(busync.EndpointError, match=rf"{runtime_dir}/new: Permission denied.*BUSYNC_RUNTIME_DIR"):
            Endpoint.resolve("policy").claim()

    check_in_child(as_another_user)


# B83: rights


@pytest.fixture
def loose_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_b83_nothing_is_looser_at_any_instant(runtime_dir: Path, loose_umask: None) -> None:
    """Whatever the umask, directories are 0700, and the lock and the sockets 0600, from the moment that they exist."""
    base = runtime_dir / "base"
    policy = base / "deep" / "policy"
    paths = [base, base / "deep", policy, policy / "lock", policy / "bus", policy / "door"]
    seen: set[tuple[str, int]] = set()

    def look(frame: object, event: str, argument: object) -> None:
        if event in ("c_call", "c_return"):  # after every single call of the system, and before the next
            for path in paths:
                with suppress(FileNotFoundError):
                    seen.add((path.name, mode(path)))

    os.environ["BUSYNC_RUNTIME_DIR"] = str(base / "deep")  # the fixture puts it back
    threading.setprofile(look)
    try:
        with blocking.Publisher("policy"):
            pass
    finally:
        threading.setprofile(None)
    directories = {(name, 0o700) for name in ("base", "deep", "policy")}
    assert seen == directories | {(name, 0o600) for name in ("lock", "bus", "door")}


@pytest.mark.parametrize("bad", [0o770, 0o720, 0o702, 0o777])
def test_b83_a_directory_that_others_may_write_to_is_refused(runtime_dir: Path, bad: int) -> None:
    """A directory in which others could put sockets is refused by both ends, wherever it is on the way."""
    os.environ["BUSYNC_RUNTIME_DIR"] = str(runtime_dir / "run")
    (runtime_dir / "run" / "policy").mkdir(parents=True, mode=0o700)
    for path in (runtime_dir / "run", runtime_dir / "run" / "policy"):
        path.chmod(bad)
        for end in (blocking.Publisher("policy"), blocking.Subscriber("policy")):
            with pytest.raises(busync.EndpointError, match=f"others may write to {path} "):
                end.__enter__()
        path.chmod(0o700)


@as_root
def test_b83_other_users_are_refused(runtime_dir: Path) -> None:
    """Another user is stopped by the directory; one who gets past it, by what the kernel says of the connection."""
    runtime_dir.chmod(0o711)

    def stranger(error: type[Exception], what: str) -> Callable[[], None]:
        def run() -> None:
            os.setuid(12345)
            with pytest.raises(error, match=what), blocking.Subscriber(runtime_dir / "p", connect_timeout=1):
                pass

        return run

    with blocking.Publisher(runtime_dir / "p"):
        check_in_child(stranger(busync.PublisherLost, "Permission denied"))
    with blocking.Publisher(runtime_dir / "p", allow_uids=[54321]) as pub:
        check_in_child(stranger(busync.RefusedError, r"uid.*user 12345 may not subscribe"))
        wait_until(lambda: pub.status()["subscribers"] == [])


# B95: the publisher starts again


def killed(learner: Any, runtime_dir: Path) -> None:
    learner.kill()


def closed(learner: Any, runtime_dir: Path) -> None:
    learner.stop()


def killed_and_swept(learner: Any, runtime_dir: Path) -> None:
    shutil.rmtree(runtime_dir / "policy")
    learner.kill()


@pytest.mark.parametrize("end", [killed, closed, killed_and_swept])
def test_b95_readers_follow_a_publisher_that_starts_again(
    cast: Cast, runtime_dir: Path, end: Callable[[Any, Path], None]
) -> None:
    """Readers find a new publisher on the old path within 5 s, see that it is new, and adopt its v1 after a v9."""
    learner = cast.publisher("policy")
    readers = [cast.subscriber("policy", flavour) for flavour in ("asyncio", "uvloop", "blocking")]
    for _ in range(9):
        learner.call("publish")
    for reader in readers:
        assert reader.call("next")[0] == 9
        reader.call("keep")
    before = learner.call("incarnation")
    for reader in readers:
        reader.start("next", timeout=15)
    end(learner, runtime_dir)
    learner = cast.publisher("policy")
    begun = time.monotonic()
    assert learner.call("publish")["version"] == 1
    for reader in readers:
        version, _, incarnation = reader.finish()
        assert (version, incarnation) == (1, learner.call("incarnation"))
        assert incarnation != before
        assert reader.call("state") == {"version": 1, "adopted": 1, "lag": 0}
        reader.call("keep")
        assert reader.call("check") == 2  # v9 is as it was
    assert time.monotonic() - begun < 5
    for reader in readers:
        mapped = reader.call("mappings")
        reader.call("drop", newest=True)
        # What v1 was mapped to may be kept for a v2; nothing is kept of a session that has ended.
        assert reader.call("mappings") <= mapped - 1, "v9 is still mapped"


def test_b95_a_publisher_whose_directory_was_taken_leaves_its_successor_alone(cast: Cast, runtime_dir: Path) -> None:
    """A publisher that ends after its directory was replaced does not remove the sockets of the one that is there."""
    old = cast.publisher("policy")
    reader = cast.subscriber("policy")
    old.call("publish")
    assert reader.call("next")[0] == 1
    shutil.rmtree(runtime_dir / "policy")
    new = cast.publisher("policy")
    new.call("publish")
    assert old.call("publish")["version"] == 2
    assert reader.call("next")[::2] == (2, old.call("incarnation"))  # its connection lives
    reader.start("next", timeout=10)
    old.stop()
    assert reader.finish()[::2] == (1, new.call("incarnation"))
    assert cast.subscriber("policy").call("next")[0] == 1
    assert sorted(os.listdir(runtime_dir / "policy")) == ["bus", "door", "lock"]
