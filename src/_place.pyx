"""What every put and get does, in as few steps as it takes: hence in C.

`Path` goes the everyday way, and leaves whatever is unusual to the connector's own methods, which know all ways. `make`
and `read` are the metadata of a payload in shared memory. `read` knows only what is right; whatever else comes is left to
``metadata.py``, which says what is wrong with it.
"""
cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Copy
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from ofs cimport OFS_BLOCK_LIMIT

from omni_fastshm cimport _codec, _core, _meter

from omni_fastshm._core import Lease
from omni_fastshm.errors import locate

_codec.know_source(Lease, _core.hold_part, _core.drop_part)

cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object)
    # Unlike PyDict_GetItem it need not put aside an exception that may be on its way.
    PyObject *PyDict_GetItemWithError(object, object) except? NULL


def make(str name not None, uint64_t size, uint32_t block, uint64_t sequence, tuple edge not None,
         str request not None, str host not None):
    """What `put` returns for a payload of `size` bytes at ``(name, block, sequence)``; plain data.

    Args:
        name: of the producer's control segment.
        size: serialized size in bytes.
        block: number of its descriptor there.
        sequence: which publication of that descriptor.
        edge: ``(from, to)``.
        request: the request id.
        host: the producer's, as `segments.host_identity` gives it.
    """
    return filled(place_at(name, edge, host), size, block, sequence, request)


cdef dict place_at(str name, tuple edge, str host):
    """What is the same in all places of one producer and edge."""
    return {
        "name": name,
        "size": 0,
        "block": 0,
        "sequence": 0,
        "from_stage": edge[0],
        "to_stage": edge[1],
        "request_id": "",
        "host": host,
    }


cdef dict filled(dict place, uint64_t size, uint32_t block, uint64_t sequence, str request):
    cdef object total = size
    place["size"] = total
    place["block"] = block
    place["sequence"] = sequence
    place["request_id"] = request
    return {"shm": place, "size": total}


cdef struct Place:
    uint32_t block
    uint64_t sequence
    int64_t size


def read(object metadata, tuple edge not None, str request not None, str host not None):
    """``(name, block, sequence, size)`` from metadata made for this call on this very host.

    Returns:
        None for anything unusual: to be looked at again by `metadata.check_place`. The name is any text.
    """
    cdef Place place
    name = read_place(metadata, edge, request, host, &place)
    return None if name is None else (name, place.block, place.sequence, place.size)


cdef object read_place(object metadata, tuple edge, str request, str host, Place *at):
    cdef PyObject *found
    cdef dict place
    cdef int64_t size, block, sequence
    if type(metadata) is not dict:
        return None
    found = PyDict_GetItemWithError(metadata, "shm")
    if found == NULL or type(<object>found) is not dict:
        return None
    place = <dict>found
    if not (is_text(place, "from_stage", <str?>edge[0]) and is_text(place, "to_stage", <str?>edge[1])
            and is_text(place, "request_id", request) and is_text(place, "host", host)):
        return None
    size = whole(place, "size")
    block = whole(place, "block")
    sequence = whole(place, "sequence")
    if size < 0 or sequence < 0 or not 0 <= block < OFS_BLOCK_LIMIT or whole(<dict>metadata, "size") != size:
        return None
    found = PyDict_GetItemWithError(place, "name")
    if found == NULL or type(<object>found) is not str:
        return None
    at.block, at.sequence, at.size = <uint32_t>block, sequence, size
    return <object>found


cdef bint is_text(dict place, str key, str wanted) except -1:
    cdef PyObject *found = PyDict_GetItemWithError(place, key)
    return found != NULL and type(<object>found) is str and <str>found == wanted


cdef int64_t whole(dict place, str key) except? -1:
    """The number that stands there, -1 when it is none."""
    cdef PyObject *found = PyDict_GetItemWithError(place, key)
    if found == NULL or type(<object>found) is not int:
        return -1
    try:
        return <object>found
    except OverflowError:
        return -1


@cython.final
cdef class Edge:
    """An edge as callers name it, and as shared memory knows it."""
    cdef object sender    # the very objects of the last call, so that the next one need not look them up
    cdef object receiver
    cdef tuple names
    cdef uint64_t number
    cdef uint32_t bell    # that the receiver listens to
    cdef str name         # of the producer that `place` is for
    cdef dict place       # what is the same in all its places on this edge


@cython.final
cdef class Path:
    """The everyday way of one connector's puts and gets.

    Args:
        codec: what `codec.plan` is a method of.
        host_wire, allow_pickle: how payloads are planned.
        decoder: what reads them.
        meter: counts them.
        threshold: from this serialized size on payloads go to shared memory.
        keyed: so do all others, and they are announced by key.
        inboxes: the producers that the connector knows, by name.
        host: identity of this host.
        edge: ``(from_stage, to_stage) -> (names, number, bell)``, or the error that the call deserves.
        name: request id of any kind to text, or an error.
        views: large leaves are handed out as they lie, and nobody keeps a list of leases.
        alone: up to this size, exclusive, the calling thread copies by itself.
    """
    cdef public bint open       # False as soon as the connector stops
    cdef object sender          # the producer; None until the first payload in shared memory
    cdef object outbox, queue, directory  # its parts, which it has for good
    cdef object codec, decoder, rebuild, meter, edge_of, name_of
    cdef dict inboxes
    cdef str host
    cdef size_t threshold, alone
    cdef bint keyed, host_wire, allow_pickle
    cdef readonly bint views
    cdef Edge last

    def __cinit__(self, *, codec, bint host_wire, bint allow_pickle, decoder, meter, size_t threshold, bint keyed,
                  dict inboxes not None, str host not None, edge, name, bint views, size_t alone):
        self.codec = codec
        self.host_wire = host_wire
        self.allow_pickle = allow_pickle
        self.decoder = decoder
        self.rebuild = decoder.read
        self.meter = meter
        self.threshold = 0 if keyed else threshold
        self.keyed = keyed
        self.inboxes = inboxes
        self.host = host
        self.edge_of = edge
        self.name_of = name
        self.views = views
        self.alone = alone
        self.last = Edge.__new__(Edge)
        self.last.sender = self.last.receiver = self  # nobody's stage

    @property
    def producer(self):
        """Who puts; None until the first payload in shared memory."""
        return self.sender

    @producer.setter
    def producer(self, producer):
        if producer is None:
            self.outbox = self.queue = self.directory = None
        else:
            self.outbox, self.queue, self.directory = producer.outbox, producer.queue, producer.directory
        self.sender = producer

    cdef Edge edge(self, object sender, object receiver):
        cdef Edge edge = self.last
        if edge.sender is not sender or edge.receiver is not receiver:
            edge = Edge.__new__(Edge)
            edge.sender, edge.receiver = sender, receiver
            edge.names, edge.number, edge.bell = self.edge_of(sender, receiver)
            self.last = edge
        return edge

    cdef str request(self, object given):
        return <str>given if type(given) is str and PyUnicode_IS_COMPACT_ASCII(given) else self.name_of(given)

    def put(self, connector, from_stage, to_stage, request_id, data):
        """What `put` returns, for one taker and to the end; NotImplemented where the connector is to find out why not."""
        return self.put_one(connector, from_stage, to_stage, request_id, data)

    def put_each(self, connector, from_stage, to_stage, items, one):
        """The same for each of some pairs of a request id and a payload, and `one` of each that needs more."""
        return self.each(connector, from_stage, to_stage, items, one, True)

    cdef list each(self, connector, from_stage, to_stage, items, one, bint puts):
        cdef list answers = []
        for item in items:
            answer = NotImplemented
            if type(item) is tuple and len(<tuple>item) == 2:
                request, what = <tuple>item
                if puts:
                    answer = self.put_one(connector, from_stage, to_stage, request, what)
                else:
                    answer = self.get_one(connector, from_stage, to_stage, request, what)
            answers.append(one(item) if answer is NotImplemented else answer)
        return answers

    cdef object put_one(self, connector, from_stage, to_stage, request_id, data):
        cdef Edge edge
        cdef str request
        cdef bytes frame
        cdef uint64_t began, size = 0  # stays 0 on a way that is not the everyday one
        if not self.open:
            return NotImplemented
        edge, request = self.edge(from_stage, to_stage), self.request(request_id)
        if self.outbox is not None and _core.lent_of(self.outbox):
            return NotImplemented
        began = _meter.now_ns()
        try:
            plan = _codec.plan_of(self.codec, data, self.host_wire, self.allow_pickle)
            frame = _codec.bytes_below(plan, self.threshold)
            if frame is None:
                answer = self.send(connector, edge, request, data, plan, &size)
            else:
                size = PyBytes_GET_SIZE(frame)
                answer = True, size, {"inline_bytes": frame, "size": size}
        except Exception as error:
            locate(error, "put", request)
            self.meter.failed("put", began, edge.names, request)
            raise
        if size:
            _meter.count_put(self.meter, began, edge.names, request, size, frame is not None)
        else:
            self.meter.sent(began, edge.names, request, answer)
        return answer

    cdef object send(self, connector, Edge edge, str request, data, plan, uint64_t *sent):
        """Into shared memory; `sent` is the size on the everyday way."""
        cdef uint64_t size = _codec.size_of(plan), stamp = 0, sequence = 0
        cdef uint32_t block = 0
        producer, outbox, directory = self.sender, self.outbox, self.directory
        # None may overtake another one that waits for room, and extra segments are to be given back some time.
        if producer is None or self.queue or producer.extra or size >= self.alone or not _codec.is_direct(plan):
            return connector._send(edge.names, request, data, plan, 1)
        if self.keyed:
            stamp = _core.stamp_of(directory)
        if not _core.send(outbox, plan, size, edge.number, request, size, stamp, &block, &sequence):
            return connector._send(edge.names, request, data, plan, 1)
        if self.keyed:
            _core.ring(directory, edge.bell)
        if self.keyed or not self.open:
            connector._settle(producer, edge.names, request, block, sequence, stamp)
        metadata = filled(self.place(edge, producer), size, block, sequence, request)
        sent[0] = size
        return True, metadata["size"], metadata

    cdef dict place(self, Edge edge, producer):
        cdef str name = producer.name
        if edge.name is not name:
            edge.place, edge.name = place_at(name, edge.names, self.host), name
        return PyDict_Copy(edge.place)

    def get(self, connector, from_stage, to_stage, request_id, metadata):
        """What `get` returns for this metadata; NotImplemented where the connector is to find out why not."""
        return self.get_one(connector, from_stage, to_stage, request_id, metadata)

    def get_each(self, connector, from_stage, to_stage, items, one):
        """The same for each of some pairs of a request id and its metadata, and `one` of each that needs more."""
        return self.each(connector, from_stage, to_stage, items, one, False)

    cdef object get_one(self, connector, from_stage, to_stage, request_id, metadata):
        cdef Edge edge
        cdef str request
        cdef uint64_t began
        if not self.open or type(metadata) is not dict:
            return NotImplemented
        edge, request = self.edge(from_stage, to_stage), self.request(request_id)
        began = _meter.now_ns()
        try:
            found = self.take(edge, request, <dict>metadata)
            if found is NotImplemented:
                found = connector._get_by_metadata(edge.names, request, metadata, None, None)
        except Exception as error:
            locate(error, "get", request)
            self.meter.failed("get", began, edge.names, request)
            raise
        self.meter.got(began, edge.names, request, found)
        return found

    cdef object take(self, Edge edge, str request, dict metadata):
        cdef PyObject *found = PyDict_GetItemWithError(metadata, "inline_bytes")
        cdef Place place
        cdef bytes frame
        if found != NULL:
            if type(<object>found) is not bytes or whole(metadata, "size") != PyBytes_GET_SIZE(<object>found):
                return NotImplemented
            frame = <bytes>found  # held: while it is read, other threads may take it out of the dict
            return _codec.payload_of(self.decoder, frame), PyBytes_GET_SIZE(frame)
        name = read_place(metadata, edge.names, request, self.host, &place) if self.views else None
        inbox = None if name is None else self.inboxes.get(name)
        if inbox is None:
            return NotImplemented
        return _core.receive(inbox, place.block, place.sequence, edge.number, request, place.size, self.rebuild)
