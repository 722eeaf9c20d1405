"""Which work is measured: a named few by default, everything with ``--full``."""

from __future__ import annotations

from typing import Final

from bench.states import KINDS
from bench.systems.base import Cell, Mode

MODES: Final[tuple[Mode, ...]] = ("view", "read", "load", "loan")
RAM_BYTES: Final = 16 << 30  #: that modules of loading readers may take


def _cell(mode: Mode, state: str, readers: int, processes: int = 0) -> Cell:
    return Cell(mode=mode, state=state, readers=readers, processes=processes)


#: Ends within ten minutes on two cores.
QUICK: Final = (
    _cell("view", "cartpole", 4),
    _cell("view", "cartpole", 16),
    _cell("view", "cartpole", 64),
    _cell("view", "atari", 4),
    _cell("view", "gpt2", 4),
    _cell("view", "gpt2", 16),
    _cell("view", "lm", 16),
    _cell("view", "many", 4),
    _cell("read", "gpt2", 4),
    _cell("load", "gpt2", 4),
    _cell("loan", "cartpole", 4),
    _cell("loan", "lm", 4),
)

#: Takes seconds, and shows that everything works.
SMOKE: Final = (
    *(_cell(mode, "cartpole", 2) for mode in MODES),
    _cell("view", "cartpole", 5, 2),
)

FULL: Final = (
    *(
        _cell(mode, state, readers)
        for mode in MODES
        for state in KINDS
        for readers in (1, 4, 16, 64)
        if mode != "load" or readers * KINDS[state].nbytes <= RAM_BYTES
    ),
    *(_cell("view", "cartpole", readers, 8) for readers in (64, 256, 1000)),
)
