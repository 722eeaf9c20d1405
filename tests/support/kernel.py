"""What the kernel under the tests can do."""

from __future__ import annotations

import mmap

from busync.fds import address_of
from busync.handles.pagemap import pagemap


def keeps() -> bool:
    """Whether mappings can be kept between versions here: not before Linux 6.7."""
    return pagemap().untouched(address_of(mmap.mmap(-1, mmap.PAGESIZE)), mmap.PAGESIZE)
