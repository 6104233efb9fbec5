"""Counts and times of one connector, edge by edge, cheap enough to be always on.

All methods run under the GIL and call no Python between reading and writing a number, so that no count of another
thread is lost.
"""
cimport cython
from libc.stdint cimport uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef enum:
    BUCKET_COUNT = 26
    EDGE_LIMIT = 1024

BUCKETS = BUCKET_COUNT

cdef object listener = None  # of the process: called after each put and get


def listen(object function):
    """Let `function` hear of every put and get of this process; None for nobody."""
    global listener
    listener = function


cdef uint64_t now_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


def start():
    """The clock before a put or get, for `Meter`; in nanoseconds."""
    return now_ns()


cdef struct Side:  # one direction of an edge
    uint64_t count
    uint64_t size
    uint64_t ns
    uint64_t missed  # refused puts, gets that gave None
    uint64_t failed
    uint64_t[BUCKET_COUNT] buckets


cdef void _count(Side *side, uint64_t size, uint64_t ns) noexcept:
    cdef uint64_t left = ns // 1000
    cdef int bucket = 0
    while left and bucket < BUCKET_COUNT - 1:
        left >>= 1
        bucket += 1
    side.count += 1
    side.size += size
    side.ns += ns
    side.buckets[bucket] += 1


cdef dict _figures(Side *side):
    return {
        "count": side.count,
        "bytes": side.size,
        "seconds": side.ns / 1e9,
        "none": side.missed,
        "errors": side.failed,
        "buckets": [side.buckets[i] for i in range(BUCKET_COUNT)],
    }


@cython.final
cdef class _Edge:
    cdef Side put
    cdef Side get


@cython.final
cdef class Meter:
    """What one connector did.

    Args:
        connector: its kind, for listeners.
        namespace: for listeners.
        large: payloads of more bytes than this are counted as `large`.
    """
    cdef readonly str connector
    cdef readonly str namespace
    cdef readonly uint64_t puts
    cdef readonly uint64_t inline
    cdef readonly uint64_t gets
    cdef readonly uint64_t bytes
    cdef readonly uint64_t misses
    cdef readonly uint64_t errors
    cdef readonly uint64_t large
    cdef uint64_t limit
    cdef dict known  # (from, to) -> _Edge
    cdef tuple key   # of the edge that was used last
    cdef _Edge last
    cdef object __weakref__

    def __cinit__(self, str connector not None, str namespace not None, uint64_t large=0xffffffffffffffff):
        self.connector = connector
        self.namespace = namespace
        self.limit = large
        self.known = {}

    cdef _Edge edge(self, tuple key):
        if key is self.key:
            return self.last
        cdef object found = self.known.get(key)
        if found is None:
            if len(self.known) >= EDGE_LIMIT:  # somebody makes up stages: all others share one line
                key = ("", "")
                found = self.known.get(key)
            if found is None:
                found = self.known[key] = _Edge.__new__(_Edge)
            return found
        self.key, self.last = key, found
        return found

    cdef int tell(self, str op, tuple edge, str request, uint64_t size, uint64_t ns, str outcome) except -1:
        listener(self, op, edge, request, size, ns, outcome)
        return 0

    cdef int put(self, uint64_t began, tuple edge, str request, uint64_t size, bint inline_) except -1:
        cdef uint64_t ns = now_ns() - began
        cdef _Edge found = self.edge(edge)
        self.puts += 1
        self.bytes += size
        self.inline += inline_
        self.large += size > self.limit
        _count(&found.put, size, ns)
        if listener is not None:
            self.tell("put", edge, request, size, ns, "ok")
        return 0

    cdef int get(self, uint64_t began, tuple edge, str request, uint64_t size) except -1:
        cdef uint64_t ns = now_ns() - began
        cdef _Edge found = self.edge(edge)
        self.gets += 1
        self.bytes += size
        _count(&found.get, size, ns)
        if listener is not None:
            self.tell("get", edge, request, size, ns, "ok")
        return 0

    def sent(self, uint64_t began, tuple edge not None, str request, tuple answer not None):
        """A put ended with this answer."""
        cdef _Edge found
        if answer[0] is True:
            self.put(began, edge, request, answer[1], "inline_bytes" in <dict>answer[2])
            return
        found = self.edge(edge)
        found.put.missed += 1
        if listener is not None:
            self.tell("put", edge, request, 0, now_ns() - began, "refused")

    def got(self, uint64_t began, tuple edge not None, str request, tuple answer):
        """A get ended with this: ``(object, size)`` or None."""
        cdef _Edge found
        if answer is not None:
            self.get(began, edge, request, answer[1])
            return
        self.misses += 1
        found = self.edge(edge)
        found.get.missed += 1
        if listener is not None:
            self.tell("get", edge, request, 0, now_ns() - began, "none")

    def forget_misses(self, tuple edge not None, uint64_t count):
        """So many of the gets that gave None were looks of one that waits."""
        cdef _Edge found = self.edge(edge)
        self.misses -= count
        found.get.missed -= count

    def failed(self, str op not None, uint64_t began, tuple edge not None, str request):
        """A "put" or "get" raised."""
        cdef uint64_t ns = now_ns() - began
        cdef _Edge found = self.edge(edge)
        self.errors += 1
        if op == "put":
            found.put.failed += 1
        else:
            found.get.failed += 1
        if listener is not None:
            self.tell(op, edge, request, 0, ns, "error")

    def edges(self):
        """``(from, to, puts, gets)`` of every edge that was used; the last two are dicts of figures.

        Bucket i of ``buckets`` counts calls of less than 2**i microseconds that no bucket before it counts; the last one
        counts all longer ones as well.
        """
        cdef _Edge each
        return [(key[0], key[1], _figures(&(<_Edge>value).put), _figures(&(<_Edge>value).get))
                for key, value in list(self.known.items())]


cdef int count_put(meter, uint64_t began, tuple edge, str request, uint64_t size, bint inline_) except -1:
    return (<Meter?>meter).put(began, edge, request, size, inline_)
