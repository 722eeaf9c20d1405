"""The publisher's segments by id, and the threads that copy into them.

Which segment may be written is for the protocol to say; here they are only made, kept and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from busync.errors import ClosedError
from busync.forks import fork_lock, register
from busync.handles import Job, Segment, create_segment
from busync.ids import SegmentId


class Pool:
    """Segments that a publisher has mapped. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, Segment] = {}
        self._closed = False
        register(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments in the pool, without those that were dropped and are still mapped somewhere."""
        return sum(segment.nbytes for segment in list(self._segments.values()))

    def create(self, segment_id: SegmentId, nbytes: int) -> Segment:
        """Make a segment of ``nbytes`` bytes (whole pages). Blocks; a fork of the process waits for it.

        Raises:
            AllocationError: the machine has not that much memory to spare.
            FdError: the process has no descriptor left.
            ClosedError: the pool was closed.
        """
        assert segment_id not in self._segments
        with fork_lock:  # a child must not inherit the descriptor of a segment that is not yet in the pool
            segment = create_segment(nbytes, f"busync-{segment_id}")
            if not self._closed:
                self._segments[segment_id] = segment
                return segment
        segment.fd.close()
        raise ClosedError("publisher")

    def get(self, segment_id: SegmentId) -> Segment:
        """The segment with this id, which was created and not dropped."""
        return self._segments[segment_id]

    def drop(self, segment_id: SegmentId) -> None:
        """Close the descriptor and forget the mapping. The memory goes with the last mapping of any process."""
        self._segments.pop(segment_id).fd.close()

    def close(self) -> None:
        """Drop every segment. May be called again."""
        self._closed = True
        while self._segments:
            self._segments.popitem()[1].fd.close()

    def before_fork(self) -> None:
        """Nothing to do: creation and fork exclude each other."""

    def after_fork_in_child(self) -> None:
        """Close the child's copies of the descriptors, so that it does not keep the memory alive."""
        self.close()


class CopyWorkers:
    """Threads that run the jobs of plans."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="busync-copy")

    def submit(self, job: Job) -> Future[None]:
        """Start one job."""
        return self._executor.submit(job)

    def run(self, jobs: Iterable[Job]) -> None:
        """Start all jobs and block until the last has returned."""
        for future in [self._executor.submit(job) for job in jobs]:
            future.result()

    def close(self) -> None:
        """Wait for running jobs and end the threads. May be called again."""
        self._executor.shutdown(wait=True)
