"""iceoryx2: publish and subscribe with loaned samples, and a listener for those who sleep."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import payloads
from bench.peers import _framing

WITHIN_S = 60.0
LOOKS = 100_000  # between two looks at the clock


class Port:
    """One end, or both, of a service of its own.

    Args:
        place: prefix of all names.
        side: which end.
        load: what is sent, which says how long the longest message is.
        depth: how many messages may be under way.
        listens: the subscriber sleeps until it is notified, and the publisher notifies.
    """

    def __init__(self, place: str, side: str, load: str, depth: int, listens: bool) -> None:
        import iceoryx2 as iox

        # Room for the tensors, their alignment, and what msgpack says about everything else.
        size = payloads.tensor_bytes(payloads.make(load)) + 64 * payloads.KIB

        iox.set_log_level(iox.LogLevel.Error)
        self.prefix = f"{place}-iox_"
        self.root = Path(tempfile.gettempdir()) / f"{place}-iox"
        self.owner = side != "get"
        config = iox.config.default()
        config.global_cfg.prefix = iox.FileName.new(self.prefix)
        config.global_cfg.root_path = iox.Path.new(str(self.root))
        self.node = iox.NodeBuilder.new().config(config).create(iox.ServiceType.Ipc)
        self.service = (
            self.node.service_builder(iox.ServiceName.new("payloads"))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .payload_alignment(iox.Alignment.new(_framing.ALIGNMENT))
            .max_publishers(1)
            .max_subscribers(1)
            .history_size(0)
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(depth)
            .subscriber_max_borrowed_samples(depth)
            .open_or_create()
        )
        self.publisher = self.subscriber = self.notifier = self.listener = self.event = None
        if side != "get":
            self.publisher = self.service.publisher_builder().initial_max_slice_len(size).max_loaned_samples(1).create()
        if side != "put":
            self.subscriber = self.service.subscriber_builder().create()
        if listens:
            self.event = self.node.service_builder(iox.ServiceName.new("arrivals")).event().open_or_create()
            if side != "get":
                self.notifier = self.event.notifier_builder().create()
            if side != "put":
                self.listener = self.event.listener_builder().create()
                self.limit = iox.Duration.from_secs_f64(WITHIN_S)

    def close(self) -> None:
        for each in (self.listener, self.notifier, self.subscriber, self.publisher):
            if each is not None:
                each.delete()
        self.listener = self.notifier = self.subscriber = self.publisher = None
        self.event = self.service = self.node = None
        if self.owner:
            # What it keeps for other nodes of the same prefix, of which there are none.
            for entry in os.scandir("/dev/shm"):
                if entry.name.startswith(self.prefix):
                    os.unlink(entry.path)
            shutil.rmtree(self.root, ignore_errors=True)


def put(end: Port, data: Any) -> None:
    frame = _framing.Frame(data)
    sample = end.publisher.loan_slice_uninit(frame.size)
    frame.pack_into(sample.payload_ptr)
    sample.assume_init().send()
    if end.notifier is not None:
        end.notifier.notify()


def get(end: Port, note: None) -> Any:
    return view(spin(end) if end.listener is None else sleep(end))


def view(sample: Any) -> Any:
    """The payload, as views that keep the sample."""
    block = (ctypes.c_uint8 * len_of(sample)).from_address(sample.payload_ptr)
    block.sample = sample
    return _framing.unpack(block)


def len_of(sample: Any) -> int:
    return int(sample.header.number_of_elements)


def spin(end: Port) -> Any:
    receive = end.subscriber.receive
    limit = 0.0
    while True:
        for _ in range(LOOKS):
            if (sample := receive()) is not None:
                return sample
        limit = limit or time.monotonic() + WITHIN_S
        if time.monotonic() > limit:
            raise TimeoutError(f"nothing came within {WITHIN_S} s")


def sleep(end: Port) -> Any:
    """Look, then sleep until notified: a notification may be for what was taken already, or for nothing."""
    limit = 0.0
    while (sample := end.subscriber.receive()) is None:
        if not end.listener.timed_wait(end.limit):
            limit = limit or time.monotonic() + WITHIN_S
            if time.monotonic() > limit:
                raise TimeoutError(f"nothing came within {WITHIN_S} s")
    return sample
