# What other compiled modules may call without going through Python. Classes stay private to their module.
from libc.stdint cimport uint64_t

cdef uint64_t now_ns() noexcept
# `Meter.sent` of what was carried.
cdef int count_put(meter, uint64_t began, tuple edge, str request, uint64_t size, bint inline_) except -1
