"""``busync-sub`` as a process: what it does with each version, what it says, how it ends."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import busync
from tests.daemon.commands import Commands
from tests.daemon.test_pub import assert_silent_end, put, weights


def test_without_a_publisher_the_code_is_3(commands: Commands) -> None:
    sub = commands.sub("--timeout-s", 0.3)
    assert sub.wait() == 3
    assert sub.stderr.startswith("busync-sub: no publisher at ")
    assert sub.stderr.endswith("start one, or check the endpoint's name\n")
    assert sub.stderr.count("\n") == 1
    assert sub.stdout == ""


def test_without_a_newer_version_in_time_the_code_is_4(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    pub.event("published")
    sub = commands.sub("--timeout-s", 0.5)
    assert sub.wait() == 4
    assert sub.stderr.startswith("busync-sub: a version newer than 1 of topic 'default' from /")
    assert sub.stderr.endswith(" did not happen within 0.5 s\n")
    assert sub.stderr.count("\n") == 1
    assert [event["event"] for event in sub.events()] == ["attached", "adopted"]
    assert_silent_end(pub)


def test_an_event_has_every_field(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--count", 1)
    assert sub.wait() == 0
    adopted = sub.event("adopted")
    assert adopted.keys() == {
        "event", "topic", "incarnation", "version", "label", "tensors", "bytes", "latency_s", "skipped", "verified",
    }  # fmt: skip
    assert adopted["verified"] is None
    assert 0 < adopted["latency_s"] < 60
    assert len(adopted["incarnation"]) == 16
    assert_silent_end(pub)


def lie_about_digests() -> None:
    busync.content_digest = lambda tensors: bytes(32)


def test_content_that_was_not_published_is_code_5_and_not_saved(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    (tmp_path / "saved").mkdir()
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--verify", "--save", tmp_path / "saved", prepare=lie_about_digests)
    assert sub.wait() == 5
    assert sub.event("adopted")["verified"] is False
    assert sub.stderr.startswith(f"busync-sub: version 1 has digest {bytes(32).hex()}, but ")
    assert sub.stderr.count("\n") == 1
    assert os.listdir(tmp_path / "saved") == []
    assert_silent_end(pub)


def test_versions_are_saved_whole_with_what_is_known_of_them(commands: Commands, tmp_path: Path) -> None:
    torch.save({"model": weights(3), "step": 7}, tmp_path / "w.pt")
    (tmp_path / "saved").mkdir()
    pub = commands.pub(tmp_path / "w.pt", "--topic", "a/b", "--label", "ü")
    sub = commands.sub("--topic", "a/b", "--save", tmp_path / "saved", "--count", 1)
    assert sub.wait() == 0
    path = tmp_path / "saved" / "a%2Fb-1.safetensors"
    assert sub.event("adopted")["file"] == str(path)
    assert os.listdir(path.parent) == [path.name]
    assert all(torch.equal(tensor, weights(3)[name[6:]]) for name, tensor in load_file(path).items())
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["topic"], metadata["version"], metadata["label"]) == ("a/b", "1", "ü")
    assert metadata["values"] == '{"step":7}'
    assert_silent_end(pub)


def allow_small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_a_full_disk_is_one_line_and_leaves_nothing(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    (tmp_path / "saved").mkdir()
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--save", tmp_path / "saved", prepare=allow_small_files_only)
    assert sub.wait() == 1
    assert sub.stderr == f"busync-sub: {tmp_path}/saved/default-1.safetensors: File too large\n"
    assert os.listdir(tmp_path / "saved") == []
    assert_silent_end(pub)


def test_a_command_is_run_for_each_version(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    (tmp_path / "saved").mkdir()
    pub = commands.pub(tmp_path / "w.pt", "--watch", "--wait", 1)
    script = f'echo "$BUSYNC_VERSION|$BUSYNC_LABEL|$BUSYNC_FILE" >> {tmp_path}/ran; echo noise'
    sub = commands.sub("--save", tmp_path / "saved", "--exec", f"sh -c '{script}'", "--count", 2)
    assert pub.event("published")["version"] == 1
    put(tmp_path / "w.pt", 2)
    pub.event("published")
    assert sub.wait() == 0
    file = tmp_path / "saved" / "default"
    assert (tmp_path / "ran").read_text() == f"1|w.pt|{file}-1.safetensors\n2|w.pt|{file}-2.safetensors\n"
    assert sub.stderr == "noise\nnoise\n"
    assert_silent_end(pub)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("sh -c 'exit 3'", "busync-sub: --exec sh ended with code 3 for version 1; see its own messages\n"),
        ("/x/y z", "busync-sub: --exec /x/y: no such file or directory; check the command\n"),
    ],
)
def test_a_command_that_fails_is_code_1(words: str, line: str, commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--exec", words)
    assert sub.wait() == 1
    assert sub.stderr == line
    assert_silent_end(pub)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_that_runs_too(number: int, commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--exec", f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 60'")
    pid = sub.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the command")
    assert_silent_end(sub, number)
    assert not Path(f"/proc/{pid}").exists()
    assert_silent_end(pub)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_wait(number: int, commands: Commands, tmp_path: Path) -> None:
    unattached = commands.sub()
    pub = commands.pub(tmp_path / "w.pt", "--watch")
    unattached.event("attached")
    assert_silent_end(unattached, number)
    assert_silent_end(pub, number)


def test_a_lost_publisher_is_waited_for(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub("--verify")
    first = sub.event("adopted")
    assert pub.stop(signal.SIGKILL) == -signal.SIGKILL
    sub.event("lost")
    digest = put(tmp_path / "w.pt", 2)
    pub = commands.pub(tmp_path / "w.pt")
    second = sub.event("adopted")
    assert (second["version"], second["digest"], second["skipped"]) == (1, digest, 0)
    assert second["incarnation"] != first["incarnation"]
    sub.until(lambda: [e["event"] for e in sub.events()].count("attached") == 2, "a second attached")
    assert_silent_end(pub)
    sub.event("lost")
    assert_silent_end(sub)


def close_the_reading_end() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    os.close(reader)


def test_output_that_nobody_reads_ends_it_with_one_line(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    sub = commands.sub(prepare=close_the_reading_end)
    assert sub.wait() == 1
    assert sub.stderr == "busync-sub: nobody reads the output any more\n"
    assert_silent_end(pub)
