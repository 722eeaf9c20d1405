"""The publisher's segments by id.

Which segment may be written is for the protocol to say; here they are only made, kept and dropped.
"""

from __future__ import annotations

from busync.errors import ClosedError
from busync.fds import OwnedFd
from busync.forks import ForkAware, fork_lock, register
from busync.handles import Segment, create_segment, open_segment
from busync.ids import SegmentId


class Pool(ForkAware):
    """Segments that a publisher has mapped. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, Segment] = {}
        self._making: set[OwnedFd] = set()  #: descriptors of segments that are being made
        self._closed = False
        register(self)

    def create(self, segment_id: SegmentId, nbytes: int) -> Segment:
        """Make a segment of ``nbytes`` bytes (whole pages). Blocks.

        Raises:
            AllocationError: the machine has not that much memory to spare.
            FdError: the process has no descriptor left.
            ClosedError: the pool was closed.
        """
        assert segment_id not in self._segments
        with fork_lock:  # a child must not inherit a descriptor that its hook does not see
            fd = open_segment(f"busync-{segment_id}")
            self._making.add(fd)
        try:
            segment = create_segment(fd, nbytes)  # long, and without the lock: nobody waits for it
            with fork_lock:
                if self._closed:
                    fd.close()
                    raise ClosedError("publisher")
                self._segments[segment_id] = segment
        finally:
            self._making.discard(fd)
        return segment

    def get(self, segment_id: SegmentId) -> Segment:
        """The segment with this id, which was created and not dropped."""
        return self._segments[segment_id]

    def drop(self, segment_id: SegmentId) -> None:
        """Close the descriptor and forget the mapping, if there is such a segment.

        The memory goes with the last mapping of any process.
        """
        segment = self._segments.pop(segment_id, None)
        if segment is not None:
            segment.fd.close()

    def close(self) -> None:
        """Drop every segment. May be called again."""
        with fork_lock:  # or a segment that is being made could still come in
            self._closed = True
            while self._segments:
                self._segments.popitem()[1].fd.close()

    def after_fork_in_child(self) -> None:
        """Close the child's copies of the descriptors, so that it does not keep the memory alive."""
        self.close()
        for fd in self._making:
            fd.close()
