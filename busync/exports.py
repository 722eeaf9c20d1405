"""What the sessions of a publisher were given of memory on GPUs, and what ends it. On the publisher's thread."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from busync.calls import start_job
from busync.handles import CudaSegment, Reader, decode_handle, encode_handle, gpus
from busync.ids import Incarnation, SegmentId
from busync.wire import DeviceSegment, decode_door_down

logger = logging.getLogger("busync")

FIRST_REAP, LAST_REAP = 0.02, 1.0  #: seconds between looks at exports that have not ended yet


class Exports:
    """Makes exports for sessions, and sees to it that they are noticed when they end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers: ThreadPoolExecutor, counters: Counter[str]) -> None:
        self._loop = loop
        self._workers = workers
        self._counters = counters
        self._reaper: asyncio.Task[None] | None = None

    def messages(
        self,
        reader: Reader,
        name: str,
        incarnation: Incarnation,
        segment: SegmentId,
        devices: Mapping[str, CudaSegment],
    ) -> Iterator[DeviceSegment]:
        """What opens a segment's memory on each GPU, for one session alone.

        Raises:
            DeviceError, RuntimeError: torch cannot export it.
        """
        for device, memory in devices.items():
            handle = memory.export(replace(reader, name=name))
            yield DeviceSegment(
                incarnation=incarnation, segment=segment, device=device, nbytes=memory.nbytes,
                handle=encode_handle(handle),
            )  # fmt: skip

    def end(self, reader: Reader) -> None:
        """A session is over; what it was given ends soon, or without a word."""
        gpus.exporter().end(reader)
        self.reap_soon()

    def take_back(self, packets: Iterable[bytes]) -> None:
        """Exports that have not reached their reader would count for as long as its process lives."""
        for data in packets:
            message = decode_door_down(data)
            if isinstance(message, DeviceSegment):
                gpus.exporter().take_back(decode_handle(message.segment, message.nbytes, message.handle))

    def reap_soon(self) -> None:
        """See to it that exports are noticed that end after their session, or whose segment was dropped."""
        if self._reaper is None or self._reaper.done():
            self._reaper = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        pause = FIRST_REAP
        while gpus.exporter().waiting():
            try:
                freed = await start_job(self._loop, self._workers, gpus.exporter().reap)
                self._counters["exports of dead readers"] += len(freed)
            except RuntimeError:  # a GPU has failed: others may not have
                logger.exception("what was exported from GPUs could not be looked at")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_REAP)

    def tidy(self) -> None:
        """At the publisher's end, after its segments were dropped: give back what can be."""
        try:
            gpus.exporter().tidy()
        except RuntimeError:  # a GPU has failed; everything else is still given back
            logger.exception("what was exported from GPUs could not be looked at")
