"""The publisher's segments by id.

Which segment may be written is for the protocol to say; here they are only made, kept and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from busync.errors import ClosedError
from busync.fds import OwnedFd
from busync.forks import ForkAware, fork_lock, register
from busync.handles import CudaSegment, MixedBuilder, Segment, TensorBuilder, create_segment, gpus, open_segment
from busync.ids import SegmentId
from busync.manifest import Manifest
from busync.protocol.ledger import Devices


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """A segment of the pool: its memory on the host, and on GPUs."""

    host: Segment | None = None
    devices: dict[str, CudaSegment] = field(default_factory=dict)  #: by UUID

    @property
    def mapping(self) -> memoryview:
        """The bytes of the host's memory, writable; none if the segment has no such memory."""
        return memoryview(self.host.mapping if self.host is not None else b"")

    def builder(self, manifest: Manifest) -> TensorBuilder:
        """A builder of tensors over this memory, which has room for the manifest."""
        host = TensorBuilder(self.mapping, manifest)
        if not manifest.devices:
            return host
        return MixedBuilder([host, *(self.devices[spec.device].builder(manifest) for spec in manifest.devices)])

    def drop(self) -> None:
        """Let go of it. The memory goes with its last user."""
        if self.host is not None:
            self.host.fd.close()
        for segment in self.devices.values():
            segment.drop()


class Pool(ForkAware):
    """Segments that a publisher has made. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, Pooled] = {}
        self._making: set[OwnedFd] = set()  #: descriptors of segments that are being made
        self._closed = False
        register(self)

    def create(self, segment_id: SegmentId, nbytes: int, devices: Devices = ()) -> Pooled:
        """Make a segment of ``nbytes`` bytes (whole pages) on the host, and so many on GPUs: all or nothing. Blocks.

        Raises:
            AllocationError: the machine, or a GPU, has not that much memory to spare.
            DeviceError: memory of a GPU cannot be shared.
            FdError: the process has no descriptor left.
            ClosedError: the pool was closed.
        """
        assert segment_id not in self._segments
        made = Pooled(self._create_host(segment_id, nbytes) if nbytes else None)
        try:
            for device, size in devices:
                made.devices[device] = gpus.exporter().create(device, size)
            with fork_lock:
                if self._closed:
                    raise ClosedError("publisher")
                self._segments[segment_id] = made
        except BaseException:
            made.drop()
            raise
        finally:
            if made.host is not None:
                self._making.discard(made.host.fd)
        return made

    def _create_host(self, segment_id: SegmentId, nbytes: int) -> Segment:
        with fork_lock:  # a child must not inherit a descriptor that its hook does not see
            fd = open_segment(f"busync-{segment_id}")
            self._making.add(fd)
        try:
            return create_segment(fd, nbytes)  # long, and without the lock: nobody waits for it
        except BaseException:
            self._making.discard(fd)
            raise

    def get(self, segment_id: SegmentId) -> Pooled:
        """The segment with this id, which was created and not dropped."""
        return self._segments[segment_id]

    def drop(self, segment_id: SegmentId) -> bool:
        """Forget a segment, if there is one; says whether it had memory on a GPU.

        The memory on the host goes with the last mapping of any process, that on a GPU with the last export.
        """
        segment = self._segments.pop(segment_id, None)
        if segment is not None:
            segment.drop()
        return segment is not None and bool(segment.devices)

    def close(self) -> None:
        """Drop every segment. May be called again."""
        with fork_lock:  # or a segment that is being made could still come in
            self._closed = True
            while self._segments:
                self._segments.popitem()[1].drop()

    def after_fork_in_child(self) -> None:
        """Close the child's copies of the descriptors, so that it does not keep the memory alive."""
        for segment in self._segments.values():
            for on_device in segment.devices.values():
                on_device.after_fork_in_child()  # or to drop it would free what is the parent's
        self.close()
        for fd in self._making:
            fd.close()
