"""What the commands say when they are called wrongly or find nothing: one line and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.commands import Commands


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        ("busync-pub", [], "busync-pub: Missing argument 'ENDPOINT'; see --help"),
        ("busync-pub", ["policy"], "busync-pub: Missing argument 'SOURCE'; see --help"),
        ("busync-pub", ["policy", "x", "--bogus"], "busync-pub: No such option: --bogus; see --help"),
        ("busync-pub", ["policy", "/x/y", "--wait", "some"], "'some' is not all, none or a number; see --help"),
        ("busync-pub", ["policy", "/x/y", "--when-full", "explode"], "see --help"),
        ("busync-pub", ["policy", "/x/y", "--timeout-s", "-1"], "see --help"),
        ("busync-pub", ["policy", "/x/y"], "busync-pub: /x/y is not there; check the path, or --watch to wait for it"),
        ("busync-pub", ["policy", "/x/y", "--watch"], "busync-pub: the directory /x is not there; make it first"),
        ("busync-pub", ["", "/"], "busync-pub: endpoint ''"),
        ("busync-sub", [""], "busync-sub: endpoint ''"),
        ("busync-pub", ["policy", "/", "--topic", ""], "--topic='' is not allowed; use 1 to 200 bytes"),
        ("busync-pub", ["policy", "/", "--label", "a\nb"], "--label='a\\nb' is not allowed; use 0 to 200 bytes"),
        ("busync-sub", [], "busync-sub: Missing argument 'ENDPOINT'; see --help"),
        ("busync-sub", ["policy", "--count", "0"], "see --help"),
        ("busync-sub", ["policy", "--timeout-s", "soon"], "see --help"),
        ("busync-sub", ["policy", "--save", "/x/y"], "busync-sub: --save /x/y is not a directory; create it"),
        ("busync-sub", ["policy", "--exec", "'x"], "busync-sub: --exec 'x: no closing quotation; check the quotes"),
        ("busync-sub", ["policy", "--exec", " "], "--exec=' ' is not allowed; use a command"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(command: str, arguments: list[str], line: str, commands: Commands) -> None:
    called = commands(command, *arguments)
    assert called.wait() == 2
    assert line in called.stderr
    assert called.stderr.count("\n") == 1
    assert called.stderr.startswith(f"{command}: ")
    assert called.stdout == ""


@pytest.mark.parametrize("command", ["busync-pub", "busync-sub"])
def test_help_names_every_flag(command: str, commands: Commands) -> None:
    called = commands(command, "--help")
    assert called.wait() == 0
    assert called.stderr == ""
    flags = {
        "busync-pub": "--watch --topic --label --wait --timeout-s --max-segments --when-full --lease-timeout-s --json",
        "busync-sub": "--topic --name --count --timeout-s --verify --save --exec --json",
    }[command]
    assert all(f"  {flag} " in called.stdout for flag in flags.split())


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("w.safetensors", b"", "w.safetensors: incomplete, or not a safetensors file"),
        ("w.safetensors", bytes(100), "w.safetensors: incomplete or damaged"),
        ("w.pt", b"PK", "w.pt: incomplete, or not written by torch.save"),
        ("w.gguf", b"GGUF", "w.gguf: the suffix '.gguf' is not known; use one of .safetensors"),
    ],
    ids=["empty", "zeros", "cut", "unknown"],
)
def test_an_unreadable_checkpoint_is_one_line_and_code_1(
    name: str, content: bytes, line: str, commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    called = commands("busync-pub", "policy", tmp_path / name)
    assert called.wait() == 1
    assert line in called.stderr
    assert called.stderr.count("\n") == 1


def test_an_empty_directory_is_one_line_and_code_1(commands: Commands, tmp_path: Path) -> None:
    called = commands("busync-pub", "policy", tmp_path)
    assert called.wait() == 1
    assert called.stderr.startswith(f"busync-pub: {tmp_path}: no checkpoint in this directory; put a file there")
