from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busync import forks
from busync.errors import EndpointError, EndpointInUse, FdError
from busync.fds import open_fds
from busync.transport.endpoint import Endpoint
from tests.forking import check_in_child
from tests.test_fds import no_descriptor_left

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: pytest's own are too long for sockets at times."""
    with tempfile.TemporaryDirectory(prefix="bs-") as path:
        yield Path(path)


@pytest.fixture
def runtime(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUSYNC_RUNTIME_DIR", str(place / "run"))
    return place / "run"


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def bind(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    return sock


# resolve


def test_bare_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSYNC_RUNTIME_DIR", "/a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/b")
    assert Endpoint.resolve("policy") == Endpoint("policy", "/a/policy", "/a")
    monkeypatch.setenv("BUSYNC_RUNTIME_DIR", "")
    assert Endpoint.resolve("policy") == Endpoint("policy", "/b/busync/policy", "/b/busync")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    user = f"/tmp/busync-{os.geteuid()}"
    assert Endpoint.resolve("policy") == Endpoint("policy", f"{user}/policy", user)


def test_paths(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.chdir(place)
    here = os.getcwd()
    for text, directory in [
        ("/x/y", "/x/y"),
        ("/x/y/", "/x/y"),
        ("ipc:///x/y", "/x/y"),
        ("./y", f"{here}/y"),
        ("y/../z", f"{here}/z"),
        ("ipc://y", f"{here}/y"),
    ]:
        assert Endpoint.resolve(text) == Endpoint(text, directory, None)
    assert Endpoint.resolve(Path("y")) == Endpoint("y", f"{here}/y", None)


def test_the_files_of_an_endpoint() -> None:
    endpoint = Endpoint.resolve("/x/y")
    assert endpoint.bus_path == "/x/y/bus"
    assert endpoint.door_path == "/x/y/door"
    assert endpoint.lock_path == "/x/y/lock"


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a\0b", "/a\0b", "ipc://", "ipc://..", "tcp://host:1", "ipc://tcp://x"]
)
def test_bad_names(text: str) -> None:
    with pytest.raises(EndpointError, match="use a name such as"):
        Endpoint.resolve(text)


def test_names_that_are_no_text() -> None:
    with pytest.raises(EndpointError, match="not text"):
        Endpoint.resolve(os.fsencode("/x"))  # type: ignore[arg-type]
    with pytest.raises(EndpointError, match="cannot be resolved"):
        Endpoint.resolve("\ud800")
    with pytest.raises(EndpointError, match="UTF-8"):
        Endpoint.resolve(os.fsdecode(b"/x/\xff"))


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    with pytest.raises(EndpointError, match="absolute path"):
        Endpoint.resolve("./x")


def test_the_limit_is_counted_in_bytes(place: Path) -> None:
    room = 107 - len(str(place)) - len("//door")
    longest = Endpoint.resolve(place / ("x" * room))
    assert len(longest.door_path) == 107
    longest.claim().release()
    bind(longest.door_path).close()
    with pytest.raises(EndpointError, match=r"108 bytes, more than the 107.*shorter"):
        Endpoint.resolve(place / ("x" * (room + 1)))
    with pytest.raises(EndpointError, match="more than the 107"):
        Endpoint.resolve(place / ("ä" * (room // 2 + 1)))


# claim


def test_claim_makes_private_directories(place: Path) -> None:
    claim = Endpoint.resolve(place / "a" / "b" / "c").claim()
    for path in ("a", "a/b", "a/b/c"):
        assert mode(place / path) == 0o700
    assert mode(place / "a/b/c/lock") == 0o600
    claim.release()
    assert os.listdir(place / "a/b/c") == ["lock"]


@pytest.mark.parametrize("umask", [0o000, 0o277, 0o777])
def test_claim_under_any_umask(runtime: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        claim = Endpoint.resolve("policy").claim()
    finally:
        os.umask(before)
    assert mode(runtime) == mode(runtime / "policy") == 0o700
    claim.release()


def test_directories_on_the_way_under_any_umask(place: Path) -> None:
    before = os.umask(0o777)
    try:
        claim = Endpoint.resolve(place / "a" / "b" / "c").claim()
    finally:
        os.umask(before)
    assert [mode(place / path) for path in ("a", "a/b", "a/b/c")] == [0o700] * 3
    claim.release()


def test_nothing_is_ever_looser(runtime: Path) -> None:
    seen: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for path in (runtime, runtime / "policy", runtime / "policy" / "lock"):
                with contextlib.suppress(FileNotFoundError):
                    seen.add(mode(path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.umask(0)
    try:
        for _ in range(100):
            claim = Endpoint.resolve("policy").claim()
            claim.release()
            os.unlink(runtime / "policy" / "lock")
            os.rmdir(runtime / "policy")
            os.rmdir(runtime)
    finally:
        os.umask(before)
        done.set()
        watcher.join()
    assert seen <= {0o700, 0o600}


def test_other_users_are_let_in_when_asked_for(runtime: Path) -> None:
    claim = Endpoint.resolve("policy").claim([12345])
    endpoint = claim.endpoint
    assert mode(runtime) == mode(endpoint.directory) == 0o711
    sockets = [bind(endpoint.bus_path), bind(endpoint.door_path)]
    claim.open_sockets()
    assert mode(endpoint.bus_path) == mode(endpoint.door_path) == 0o666
    claim.release()
    for sock in sockets:
        sock.close()
    Endpoint.resolve("policy").claim().release()
    assert mode(endpoint.directory) == 0o700


def test_sockets_are_private_otherwise(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    with bind(claim.endpoint.bus_path), bind(claim.endpoint.door_path):
        claim.open_sockets()
        assert mode(claim.endpoint.bus_path) == mode(claim.endpoint.door_path) == 0o600
    claim.release()
    with pytest.raises(EndpointError, match="bus: No such file"):
        claim.open_sockets()


def test_a_second_claim_is_refused(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    fds = open_fds()
    with pytest.raises(EndpointInUse) as caught:
        Endpoint.resolve(place / "e").claim()
    assert caught.value.pid == os.getpid()
    assert open_fds() == fds
    claim.release()
    Endpoint.resolve(place / "e").claim().release()


@pytest.mark.parametrize(("mine", "theirs"), [((12345,), ()), ((), (12345,))])
def test_a_refused_claim_changes_no_mode(runtime: Path, mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    claim = Endpoint.resolve("policy").claim(mine)
    before = mode(claim.endpoint.directory)
    with pytest.raises(EndpointInUse):
        Endpoint.resolve("policy").claim(theirs)
    assert mode(claim.endpoint.directory) == before
    claim.release()


def test_the_holder_may_be_slow_to_write_its_pid(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    os.truncate(claim.endpoint.lock_path, 0)
    with pytest.raises(EndpointInUse, match="pid 0"):
        Endpoint.resolve(place / "e").claim()
    claim.release()


HOLDER = """
import os, socket, sys, time
from busync.transport.endpoint import Endpoint
claim = Endpoint.resolve(sys.argv[1]).claim()
for path in (claim.endpoint.bus_path, claim.endpoint.door_path):
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(path)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(1)
time.sleep(20)
os._exit(0)
"""


def test_what_a_killed_publisher_left_is_swept_though_its_child_lives(place: Path) -> None:
    endpoint = Endpoint.resolve(place / "e")
    with subprocess.Popen([sys.executable, "-c", HOLDER, endpoint.directory], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        orphan = int(holder.stdout.readline())
        try:
            with pytest.raises(EndpointInUse) as caught:
                endpoint.claim()
            assert caught.value.pid == holder.pid
            holder.kill()
            holder.wait()
            assert stat.S_ISSOCK(os.lstat(endpoint.bus_path).st_mode)
            lock = os.stat(endpoint.lock_path).st_ino
            claim = endpoint.claim()
        finally:
            os.kill(orphan, signal.SIGKILL)
    assert os.listdir(endpoint.directory) == ["lock"]
    assert os.stat(endpoint.lock_path).st_ino == lock
    claim.release()


def test_release_is_tolerant(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    for name in os.listdir(claim.endpoint.directory):
        os.unlink(place / "e" / name)
    os.rmdir(claim.endpoint.directory)
    claim.release()
    claim.release()


def test_a_second_release_does_not_touch_the_next_publisher(place: Path) -> None:
    old = Endpoint.resolve(place / "e").claim()
    old.release()
    new = Endpoint.resolve(place / "e").claim()
    with bind(new.endpoint.door_path):
        old.release()
        assert os.path.exists(new.endpoint.door_path)
        with pytest.raises(EndpointInUse):
            Endpoint.resolve(place / "e").claim()
    new.release()


def test_release_leaves_a_directory_that_was_made_anew(place: Path) -> None:
    old = Endpoint.resolve(place / "e").claim()
    shutil.rmtree(place / "e")
    new = Endpoint.resolve(place / "e").claim()
    with bind(new.endpoint.bus_path):
        old.release()
        assert sorted(os.listdir(place / "e")) == ["bus", "lock"]
        with pytest.raises(EndpointInUse):
            Endpoint.resolve(place / "e").claim()
    new.release()
    assert os.listdir(place / "e") == ["lock"]


def test_release_leaves_what_is_not_its_own(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    (place / "e" / "bus").write_text("precious")
    claim.release()
    assert (place / "e" / "bus").read_text() == "precious"


def test_a_child_releases_nothing(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    sock = bind(claim.endpoint.door_path)

    def check() -> None:
        claim.release()
        claim.after_fork_in_child()
        assert not os.path.exists(f"/proc/self/fd/{lock}")
        with pytest.raises(EndpointInUse):
            Endpoint.resolve(place / "e").claim()

    lock = claim._lock.fileno()
    check_in_child(check)
    assert os.path.exists(claim.endpoint.door_path)
    with pytest.raises(EndpointInUse):
        Endpoint.resolve(place / "e").claim()
    sock.close()
    claim.release()


def test_a_child_without_hooks_releases_nothing(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    forks.unregister(claim)
    with bind(claim.endpoint.door_path):
        check_in_child(claim.release)
        assert os.path.exists(claim.endpoint.door_path)
        with pytest.raises(EndpointInUse):
            Endpoint.resolve(place / "e").claim()
    claim.release()


def test_a_child_without_hooks_does_not_keep_a_released_lock(place: Path) -> None:
    claim = Endpoint.resolve(place / "e").claim()
    forks.unregister(claim)
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    claim.release()
    try:
        Endpoint.resolve(place / "e").claim().release()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["bus", "door"])
@pytest.mark.parametrize("what", ["file", "directory", "link", "fifo"])
def test_a_foreign_file_in_the_way(place: Path, name: str, what: str) -> None:
    path = place / "e" / name
    path.parent.mkdir()
    match what:
        case "file":
            path.write_text("precious")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(place)
        case _:
            os.mkfifo(path)
    fds = open_fds()
    with pytest.raises(EndpointError, match=f"e/{name} is in the way.*remove or rename") as caught:
        Endpoint.resolve(place / "e").claim()
    assert os.path.lexists(path)
    assert open_fds() == fds
    del caught
    path.rmdir() if what == "directory" else path.unlink()
    Endpoint.resolve(place / "e").claim().release()


@pytest.mark.parametrize("what", ["directory", "link", "fifo", "dangling"])
def test_a_lock_that_is_not_a_file(place: Path, what: str) -> None:
    path = place / "e" / "lock"
    path.parent.mkdir()
    match what:
        case "directory":
            path.mkdir()
        case "link":
            (place / "target").write_text("")
            path.symlink_to(place / "target")
        case "dangling":
            path.symlink_to(place / "target")
        case _:
            os.mkfifo(path)
    fds = open_fds()
    with pytest.raises(EndpointError, match="lock"):
        Endpoint.resolve(place / "e").claim()
    assert open_fds() == fds


@pytest.mark.parametrize("bad", [0o770, 0o720, 0o777, 0o702])
def test_a_directory_that_others_may_write_to(runtime: Path, bad: int) -> None:
    (runtime / "policy").mkdir(parents=True)
    for path in (runtime, runtime / "policy"):
        path.chmod(bad)
        with pytest.raises(EndpointError, match="others may write"):
            Endpoint.resolve("policy").claim()
        with pytest.raises(EndpointError, match="others may write"):
            Endpoint.resolve("policy").check_client()
        assert mode(path) == bad
        path.chmod(0o700)
    Endpoint.resolve("policy").claim().release()


def test_a_directory_that_is_a_link(place: Path) -> None:
    (place / "real").mkdir(mode=0o700)
    (place / "e").symlink_to(place / "real")
    for text in (place / "e", f"{place}/e/"):
        with pytest.raises(EndpointError, match="not a directory"):
            Endpoint.resolve(text).claim()
        with pytest.raises(EndpointError, match="not a directory"):
            Endpoint.resolve(text).check_client()
    assert os.listdir(place / "real") == []


def test_a_directory_that_is_a_file(place: Path) -> None:
    (place / "e").write_text("")
    with pytest.raises(EndpointError, match="not a directory"):
        Endpoint.resolve(place / "e").claim()
    with pytest.raises(EndpointError, match=r"Not a directory.*choose another"):
        Endpoint.resolve(place / "e" / "f").claim()
    with pytest.raises(EndpointError, match="Not a directory"):
        Endpoint.resolve(place / "e" / "f").check_client()


def test_somebodys_directory_is_not_taken_over(place: Path) -> None:
    home = place / "home"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    (home / "thesis.txt").write_text("")
    with pytest.raises(EndpointError, match=r"holds other files.*of its own"):
        Endpoint.resolve(home).claim()
    assert mode(home) == 0o755
    assert os.listdir(home) == ["thesis.txt"]


def test_an_empty_directory_is_closed(place: Path) -> None:
    (place / "e").mkdir()
    (place / "e").chmod(0o755)
    Endpoint.resolve(place / "e").claim().release()
    assert mode(place / "e") == 0o700


@as_root
def test_a_directory_of_somebody_else(runtime: Path) -> None:
    (runtime / "policy").mkdir(parents=True, mode=0o700)
    for path in (runtime / "policy", runtime):
        os.chown(path, 12345, 12345)
        with pytest.raises(EndpointError, match="belongs to uid 12345"):
            Endpoint.resolve("policy").claim()
        with pytest.raises(EndpointError, match="belongs to uid 12345"):
            Endpoint.resolve("policy").check_client()
        Endpoint.resolve(runtime / "policy").check_client()  # named by path: the caller chose it
        os.chown(path, 0, 0)


@as_root
def test_a_socket_or_lock_of_somebody_else(place: Path) -> None:
    for name in ("bus", "lock"):
        endpoint = Endpoint.resolve(place / name)
        os.mkdir(endpoint.directory, 0o700)
        if name == "bus":
            bind(endpoint.bus_path).close()
        else:
            Path(endpoint.lock_path).write_text("1")
        os.chown(f"{endpoint.directory}/{name}", 12345, 12345)
        with pytest.raises(EndpointError, match=r"in the way|not a lock file of ours"):
            endpoint.claim()


@as_root
def test_a_place_that_cannot_be_written(place: Path) -> None:
    place.chmod(0o755)

    def check() -> None:
        os.setuid(12345)
        with pytest.raises(EndpointError, match=r"Permission denied.*choose another"):
            Endpoint.resolve(place / "e").claim()

    check_in_child(check)


def test_claim_without_descriptors(place: Path) -> None:
    endpoint = Endpoint.resolve(place / "e")
    endpoint.claim().release()
    with no_descriptor_left(), pytest.raises(FdError):
        endpoint.claim()
    endpoint.claim().release()


# check_client


def test_a_missing_directory_is_fine(runtime: Path) -> None:
    Endpoint.resolve("policy").check_client()
    runtime.mkdir(mode=0o700)
    Endpoint.resolve("policy").check_client()
    Endpoint.resolve(runtime / "nowhere" / "e").check_client()


def test_the_directory_of_a_publisher_is_fine(runtime: Path) -> None:
    for uids in ((), (12345,)):
        claim = Endpoint.resolve("policy").claim(uids)
        Endpoint.resolve("policy").check_client()
        claim.release()
