"""pyzmq over ipc: PUSH and PULL, multipart messages without copies of its own.

Large tensors are frames of their own, sent and received with ``copy=False``; small ones are packed into the first
frame, because a frame costs more than their copy.
"""

from __future__ import annotations

import ctypes
from typing import Any

from bench import payloads
from bench.peers import _framing

label = "pyzmq, ipc"
differs = (
    "`send(copy=False)` returns before the bytes are sent: they must not be overwritten meanwhile. The reader sleeps "
    "in the kernel; bytes cross a socket."
)
own_channel = True
requires = ("zmq",)

APART_FROM = 64 * payloads.KIB
WITHIN_MS = 60_000


class Socket:
    def __init__(self, place: str, side: str, depth: int) -> None:
        import zmq

        self.context = zmq.Context()
        address = f"ipc://@{place}"  # an abstract name: no file
        self.push = self.pull = None
        if side != "get":
            self.push = self._socket(zmq.PUSH, depth)
            self.push.bind(address)
        if side != "put":
            self.pull = self._socket(zmq.PULL, depth)
            self.pull.connect(address)

    def _socket(self, kind: int, depth: int) -> Any:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = WITHIN_MS
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)


def open(place: str, side: str, load: str, depth: int) -> Socket:
    return Socket(place, side, depth)


def put(end: Socket, data: Any) -> None:
    frame = _framing.Frame(data, APART_FROM)
    first = bytearray(frame.size)
    frame.pack_into(_framing.address_of(first))
    end.push.send_multipart([first, *map(_bytes_of, frame.apart)], copy=False)


def get(end: Socket, note: None) -> Any:
    first, *apart = (frame.buffer for frame in end.pull.recv_multipart(copy=False))
    return _framing.unpack(first, apart)


def _bytes_of(tensor: Any) -> Any:
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return array
