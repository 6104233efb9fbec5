"""omni_fastshm with its metadata through a pipe: to compare with what moves whole payloads through one."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.peers import _fifo, ours

label = "omni_fastshm, metadata through a pipe"
differs = "The reader sleeps in the kernel until the metadata comes."
role = "ours"
own_channel = True

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder()


class End(ours.End):
    def __init__(self, place: str, side: str) -> None:
        super().__init__(place)
        self.fifo = _fifo.Fifo(place, side)

    def close(self) -> None:
        super().close()
        self.fifo.close()


def open(place: str, side: str, load: str, depth: int) -> End:
    return End(place, side)


def put(end: End, data: Any) -> None:
    end.fifo.connection.send_bytes(ENCODER.encode(ours.put(end, data)))


def get(end: End, note: None) -> Any:
    return ours.get(end, DECODER.decode(end.fifo.connection.recv_bytes()))
