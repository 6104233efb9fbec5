# What other compiled modules may call without going through Python. Classes stay private to their module.
from cpython.object cimport PyObject

# `Codec.plan` with these settings.
cdef object plan_of(codec, data, bint host, bint allow_pickle)
# `Plan.size`, `Plan.direct`, `Plan.bytes_below`.
cdef size_t size_of(plan) except? 0
cdef bint is_direct(plan) except -1
cdef bytes bytes_below(plan, size_t limit)
# `Decoder.read` of bytes that nobody shares.
cdef object payload_of(decoder, bytes frame)

# For sources of that class: `view` without an object. `Hold` gives where these bytes lie, and they stay there until `Drop`, which is
# called under the GIL.
ctypedef void *(*Hold)(source, size_t offset, size_t nbytes) except NULL
ctypedef void (*Drop)(PyObject *source) noexcept
cdef int know_source(kind, Hold hold, Drop drop) except -1
