"""The metadata of a payload in shared memory: every put makes one and every get reads one, hence in C.

`read` knows only what is right. Whatever else comes is left to ``metadata.py``, which says what is wrong with it.
"""
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from ofs cimport OFS_BLOCK_LIMIT


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


def read(object metadata, tuple edge not None, str request not None, str host not None):
    """``(name, block, sequence, size)`` from metadata made for this call on this very host.

    Returns:
        None for anything unusual: to be looked at again by `metadata.check_place`. The name is any text.
    """
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
    return <object>found, block, sequence, size


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
