"""Which work is measured: a named few by default, everything with ``--full``."""

from __future__ import annotations

from typing import Final

from bench.states import KINDS
from bench.systems.base import Cell, Mode

TIMED: Final[tuple[Mode, ...]] = ("view", "read", "load", "loan")
ON_CPU: Final = tuple(name for name, kind in KINDS.items() if not kind.on_device)
RAM_BYTES: Final = 16 << 30  #: that modules of loading readers may take

#: Cells that are compared with each other: they are measured in turns, and their ratio is taken turn by turn.
Group = tuple[Cell, ...]


def _cell(mode: Mode, state: str, readers: int, processes: int = 0) -> Cell:
    return Cell(mode=mode, state=state, readers=readers, processes=processes)


def _busy(idle: Cell) -> Group:
    """The same work twice: as it is, and with all cores busy."""
    return idle, Cell(mode=idle.mode, state=idle.state, readers=idle.readers, processes=idle.processes, busy=True)


#: Peers that a short run leaves to ``--full``: they take very long to start at a cell, or fail there after long, or the
#: same state is measured with them in another cell.
SLOW: Final[dict[str, tuple[str, ...]]] = {
    "view cartpole 16": ("torchrl",),
    "view cartpole 64": ("ray",),
    "view gpt2 4 busy": ("queues", "zmq", "files", "gloo", "torchrl"),
    "view gpt2 16": ("zmq", "torchrl"),
    "view lm 16": ("torchrl",),
    "view many 4": ("torchrl",),
    "memory gpt2 16": ("zmq", "gloo", "files", "torchrl"),
}

#: Meant to end within ten minutes on two cores, with all peers installed.
QUICK: Final[tuple[Group, ...]] = (
    (_cell("view", "cartpole", 4),),
    (_cell("view", "cartpole", 16),),
    (_cell("view", "cartpole", 64),),
    (_cell("view", "atari", 4),),
    _busy(_cell("view", "gpt2", 4)),
    (_cell("view", "gpt2", 16),),
    (_cell("view", "lm", 16),),
    (_cell("view", "many", 4),),
    (_cell("read", "gpt2", 4),),
    (_cell("load", "gpt2", 4),),
    (_cell("loan", "cartpole", 4), _cell("loan", "lm", 4)),
    (_cell("view", "cartpole", 64, 8), _cell("view", "cartpole", 1000, 8)),
    (_cell("memory", "gpt2", 16),),
    (_cell("loops", "lm", 1),),
)

#: Takes seconds, and shows that everything works.
SMOKE: Final[tuple[Group, ...]] = (
    _busy(_cell("read", "cartpole", 2))[1:],
    (_cell("load", "cartpole", 2),),
    (_cell("loan", "cartpole", 1), _cell("loan", "atari", 1)),
    (_cell("view", "cartpole", 5, 2),),
    (_cell("memory", "cartpole", 2),),
    (_cell("loops", "cartpole", 1),),
)


def _full() -> tuple[Group, ...]:
    """Every mode, state and number of readers. Loans are compared with those of the least state."""
    single: list[Group] = []
    loans: dict[int, list[Cell]] = {}
    for mode in TIMED:
        for state in ON_CPU:
            for readers in (1, 4, 16, 64):
                cell = _cell(mode, state, readers)
                if mode == "loan":
                    loans.setdefault(readers, []).append(cell)
                elif mode == "view" and state == "gpt2":
                    single.append(_busy(cell) if readers == 4 else (cell,))
                elif mode != "load" or readers * KINDS[state].nbytes <= RAM_BYTES:
                    single.append((cell,))
    connections = tuple(_cell("view", "cartpole", readers, 8) for readers in (64, 256, 1000))
    memory = tuple((_cell("memory", state, 16),) for state in ("cartpole", "gpt2", "lm"))
    return (
        *single,
        *map(tuple, loans.values()),
        connections,
        *memory,
        (_cell("loops", "lm", 1),),
        (_cell("loops", "lm", 4),),
    )


FULL: Final = _full()


def _on_gpu(states: tuple[str, ...], counts: tuple[int, ...]) -> tuple[Group, ...]:
    """A loan is compared with the floor of the view of as much to as many. Small states make up for large ones."""
    return tuple((_cell("view", state, n), _cell("loan", state, n)) for n in counts for state in states)


GPU: Final = _on_gpu(("g1", "g4", "g16"), (1, 2, 4, 8))
GPU_SMOKE: Final = _on_gpu(("g0",), (1, 2))
