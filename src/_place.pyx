"""What every put and get does, in as few steps as it takes: hence in C.

`Path` goes the everyday way, and leaves whatever is unusual to the connector's own methods, which know all ways. `make`
and `read` are the metadata of a payload in shared memory. `read` knows only what is right; whatever else comes is left to
``metadata.py``, which says what is wrong with it.
"""
cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from ofs cimport OFS_BLOCK_LIMIT
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object)


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
    return {
        "shm": {
            "name": name,
            "size": size,
            "block": block,
            "sequence": sequence,
            "from_stage": edge[0],
            "to_stage": edge[1],
            "request_id": request,
            "host": host,
        },
        "size": size,
    }


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
    found = PyDict_GetItem(metadata, "shm")
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
    found = PyDict_GetItem(place, "name")
    if found == NULL or type(<object>found) is not str:
        return None
    at.block, at.sequence, at.size = <uint32_t>block, sequence, size
    return <object>found


cdef bint is_text(dict place, str key, str wanted):
    cdef PyObject *found = PyDict_GetItem(place, key)
    return found != NULL and type(<object>found) is str and <str>found == wanted


cdef int64_t whole(dict place, str key) except? -1:
    """The number that stands there, -1 when it is none."""
    cdef PyObject *found = PyDict_GetItem(place, key)
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


cdef inline uint64_t now_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


@cython.final
cdef class Path:
    """The everyday way of one connector's puts and gets.

    Args:
        plan: `codec.plan` with this connector's settings.
        read: `Decoder.read` with this connector's settings.
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
    cdef public object producer # None until the first payload in shared memory
    cdef object take_apart, rebuild, meter, edge_of, name_of
    cdef dict inboxes
    cdef str host
    cdef size_t threshold, alone
    cdef bint keyed
    cdef readonly bint views
    cdef Edge last

    def __cinit__(self, *, plan, read, meter, size_t threshold, bint keyed, dict inboxes not None, str host not None,
                  edge, name, bint views, size_t alone):
        self.take_apart = plan
        self.rebuild = read
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
        cdef Edge edge
        cdef str request
        cdef bytes frame
        cdef uint64_t began
        if not self.open:
            return NotImplemented
        edge, request = self.edge(from_stage, to_stage), self.request(request_id)
        if self.producer is not None and self.producer.outbox.lent:
            return NotImplemented
        began = now_ns()
        try:
            plan = self.take_apart(data)
            frame = plan.bytes_below(self.threshold)
            if frame is None:
                answer = self.send(connector, edge, request, data, plan)
            else:
                answer = True, PyBytes_GET_SIZE(frame), {"inline_bytes": frame, "size": PyBytes_GET_SIZE(frame)}
        except Exception:
            self.meter.failed("put", began, edge.names, request)
            raise
        self.meter.sent(began, edge.names, request, answer)
        return answer

    cdef object send(self, connector, Edge edge, str request, data, plan):
        """Into shared memory."""
        cdef uint64_t size = plan.size, stamp = 0, block, sequence
        producer = self.producer
        # None may overtake another one that waits for room, and extra segments are to be given back some time.
        if producer is None or producer.queue or producer.extra or size >= self.alone or not plan.direct:
            return connector._send(edge.names, request, data, plan, 1)
        if self.keyed:
            stamp = producer.directory.stamp()
        place = producer.outbox.send(plan, size, edge.number, request, size, stamp)
        if place is None:
            return connector._send(edge.names, request, data, plan, 1)
        block, sequence = place
        if self.keyed:
            producer.directory.ring(edge.bell)
        if self.keyed or not self.open:
            connector._settle(producer, edge.names, request, block, sequence, stamp)
        return True, size, make(producer.name, size, block, sequence, edge.names, request, self.host)

    def get(self, connector, from_stage, to_stage, request_id, metadata):
        """What `get` returns for this metadata; NotImplemented where the connector is to find out why not."""
        cdef Edge edge
        cdef str request
        cdef uint64_t began
        if not self.open or type(metadata) is not dict:
            return NotImplemented
        edge, request = self.edge(from_stage, to_stage), self.request(request_id)
        began = now_ns()
        try:
            found = self.take(edge, request, <dict>metadata)
            if found is NotImplemented:
                found = connector._get_by_metadata(edge.names, request, metadata, None, None)
        except Exception:
            self.meter.failed("get", began, edge.names, request)
            raise
        self.meter.got(began, edge.names, request, found)
        return found

    cdef object take(self, Edge edge, str request, dict metadata):
        cdef PyObject *found = PyDict_GetItem(metadata, "inline_bytes")
        cdef Place place
        cdef bytes frame
        if found != NULL:
            if type(<object>found) is not bytes or whole(metadata, "size") != PyBytes_GET_SIZE(<object>found):
                return NotImplemented
            frame = <bytes>found  # held: while it is read, other threads may take it out of the dict
            return self.rebuild(frame), PyBytes_GET_SIZE(frame)
        name = read_place(metadata, edge.names, request, self.host, &place) if self.views else None
        inbox = None if name is None else self.inboxes.get(name)
        if inbox is None:
            return NotImplemented
        return inbox.receive(place.block, place.sequence, edge.number, request, place.size, self.rebuild)
