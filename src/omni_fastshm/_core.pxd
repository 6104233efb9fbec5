# What other compiled modules may call without going through Python. Classes stay private to their module.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

# `Outbox.lent`.
cdef uint32_t lent_of(outbox) except? 0xffffffff
# `Outbox.send`; where it went in `block` and `sequence`, or False.
cdef bint send(outbox, plan, uint64_t frame_size, uint64_t edge, str request, uint64_t total, uint64_t stamp,
               uint32_t *block, uint64_t *sequence) except -1
# `Inbox.receive`.
cdef object receive(inbox, uint32_t block, uint64_t sequence, uint64_t edge, str request, int64_t size, read)
# `Directory.stamp`, `Directory.ring`.
cdef uint64_t stamp_of(directory) except? 0
cdef int ring(directory, uint32_t stage) except -1
# `Lease.view` without the object: a hold on the lease, and the end of one.
cdef void *hold_part(lease, size_t offset, size_t nbytes) except NULL
cdef void drop_part(PyObject *lease) noexcept
