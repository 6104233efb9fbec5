# What other compiled modules may call without going through Python. Classes stay private to their module.

# `Codec.plan` with these settings.
cdef object plan_of(codec, data, bint host, bint allow_pickle)
# `Plan.size`, `Plan.direct`, `Plan.bytes_below`.
cdef size_t size_of(plan) except? 0
cdef bint is_direct(plan) except -1
cdef bytes bytes_below(plan, size_t limit)
# `Decoder.read` of bytes that nobody shares.
cdef object payload_of(decoder, bytes frame)

# `view` of the sources that `Decoder.read` is given, for those of one class.
ctypedef object (*View)(source, size_t offset, size_t nbytes, bint readonly)
cdef int know_source(kind, View view) except -1
