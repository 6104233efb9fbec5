# What Cython may call. Structures in shared memory are declared without fields, so that their bytes cannot be
# touched from here; the three with fields are private to the calling process.
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "ofs_layout.h" nogil:
    ctypedef struct ofs_u32:
        pass
    cdef struct ofs_control:
        pass
    cdef struct ofs_block:
        pass
    cdef struct ofs_directory:
        pass
    cdef struct ofs_field:
        const char *structure
        const char *name
        size_t offset
        size_t size
    const ofs_field *ofs_layout_fields(size_t *count)
    enum:
        OFS_OK
        OFS_GONE
        OFS_FULL
        OFS_BUSY
        OFS_TIMEOUT
        OFS_INTERRUPTED
        OFS_ABSENT
        OFS_LAYOUT_VERSION
        OFS_READER_SLOTS
        OFS_SHARED_SLOT
        OFS_BLOCK_LIMIT
        OFS_BLOCK_CHUNK
        OFS_KEY_LIMIT
        OFS_ENDPOINT_LIMIT
        OFS_BELLS
        OFS_LOCK_OWNER
        OFS_LOCK_READER0
        OFS_LOCK_MAKER
        OFS_LOCK_USERS
        OFS_FLAG_SHARED
        OFS_FLAG_EXTERNAL

cdef extern from "ofs_segment.h" nogil:
    cdef struct ofs_stat:
        uint64_t size
        uint64_t allocated
        uint64_t uid
        bint regular
        bint linked
    int ofs_segment_stat(int fd, ofs_stat *found)
    int ofs_segment_resize(int fd, uint64_t size)
    int ofs_segment_reserve(int fd, uint64_t offset, uint64_t size)
    enum ofs_fill:
        OFS_FILL_LATER
        OFS_FILL_NEW
        OFS_FILL_WRITTEN
    int ofs_segment_map(int fd, uint64_t size, ofs_fill fill, bint apart, void **base)
    void ofs_segment_populate(void *at, uint64_t size)
    int ofs_segment_unmap(void *base, uint64_t size)
    int ofs_lock_try(int fd, int byte, bint exclusive)
    int ofs_lock_wait(int fd, int byte, bint exclusive)
    int ofs_lock_drop(int fd, int byte)
    int ofs_lock_held(int fd, int byte)

cdef extern from "ofs_wait.h" nogil:
    void ofs_bell_ring(ofs_u32 *bell)
    void ofs_bell_ring_if_heard(ofs_u32 *bell)
    uint32_t ofs_bell_read(const ofs_u32 *bell)
    uint32_t ofs_bell_announce(ofs_u32 *bell)
    int ofs_bell_wait(ofs_u32 *bell, uint32_t seen, uint64_t spin_ns, uint64_t slice_ns, uint64_t deadline_ns)
    uint64_t ofs_now_ns()
    uint64_t ofs_about_now_ns()

cdef extern from "ofs_block.h" nogil:
    cdef struct ofs_key:
        uint64_t edge
        uint64_t request_high
        uint64_t request_low
    cdef struct ofs_content:
        ofs_key key
        uint64_t offset
        uint64_t frame_size
        uint64_t total_size
        uint64_t stamp
        uint64_t published_ns
        uint32_t segment
        uint32_t flags
    void ofs_control_make(ofs_control *control, uint64_t endpoint, uint32_t key_slots, uint64_t orphan_ttl_ns,
                          uint64_t pid)
    bint ofs_control_valid(const ofs_control *control, uint64_t size)
    uint64_t ofs_control_size()
    uint64_t ofs_control_fixed_size(uint32_t key_slots)
    uint64_t ofs_block_offset(uint32_t index)
    ofs_block *ofs_block_at(ofs_control *control, uint32_t index)
    uint32_t ofs_blocks_ready(const ofs_control *control)
    void ofs_blocks_extend(ofs_control *control, uint32_t count)
    bint ofs_block_free(const ofs_block *block)
    bint ofs_block_pending(const ofs_block *block)
    uint64_t ofs_block_sequence(const ofs_block *block)
    uint32_t ofs_block_takes(const ofs_block *block)
    uint32_t ofs_block_holders(const ofs_block *block)
    void ofs_block_publish(ofs_block *block, const ofs_content *content, uint64_t sequence, uint32_t takers)
    void ofs_block_read(const ofs_block *block, ofs_content *content)
    int ofs_block_hold(ofs_control *control, uint32_t index, uint64_t sequence, uint32_t slot, ofs_content *content)
    int ofs_block_take(ofs_control *control, uint32_t index)
    void ofs_block_release(ofs_control *control, uint32_t index, uint32_t slot)
    int ofs_block_cancel(ofs_control *control, uint32_t index, uint64_t sequence)
    uint32_t ofs_request_cancel(ofs_control *control, uint64_t request_high, uint64_t request_low)
    void ofs_reader_clear(ofs_control *control, uint32_t slot)
    void ofs_reader_mark(ofs_control *control, uint32_t slot, uint64_t pid)
    void ofs_reader_unmark(ofs_control *control, uint32_t slot)
    uint32_t ofs_readers(const ofs_control *control)
    void ofs_segment_retired(ofs_control *control)
    uint32_t ofs_segments_retired(const ofs_control *control)
    void ofs_control_close(ofs_control *control)
    bint ofs_control_closed(const ofs_control *control)
    uint64_t ofs_control_died(ofs_control *control)
    uint64_t ofs_control_orphan_ttl(const ofs_control *control)
    uint64_t ofs_control_endpoint(const ofs_control *control)
    uint32_t ofs_control_key_slots(const ofs_control *control)
    ofs_u32 *ofs_control_space(ofs_control *control)

cdef extern from "ofs_keys.h" nogil:
    cdef struct ofs_found:
        uint64_t sequence
        uint64_t stamp
        uint32_t index
        uint32_t older
    void ofs_keys_insert(ofs_control *control, const ofs_key *key, uint32_t index)
    void ofs_keys_remove(ofs_control *control, const ofs_key *key, uint32_t index)
    int ofs_keys_find(ofs_control *control, const ofs_key *key, ofs_found *found)
    uint32_t ofs_keys_cancel_older(ofs_control *control, const ofs_key *key, uint64_t stamp)
    void ofs_block_key(const ofs_block *block, ofs_key *key)

cdef extern from "ofs_directory.h" nogil:
    void ofs_directory_make(ofs_directory *directory)
    bint ofs_directory_made(const ofs_directory *directory, uint64_t size)
    bint ofs_directory_valid(const ofs_directory *directory, uint64_t size)
    int ofs_directory_enter(ofs_directory *directory, uint64_t endpoint)
    void ofs_directory_leave(ofs_directory *directory, uint64_t endpoint)
    uint32_t ofs_directory_list(const ofs_directory *directory, uint64_t *ids)
    uint32_t ofs_directory_epoch(const ofs_directory *directory)
    uint64_t ofs_directory_stamp(ofs_directory *directory)
    ofs_u32 *ofs_directory_bell(ofs_directory *directory, uint32_t hash)

cdef extern from "ofs_ring.h" nogil:
    cdef struct ofs_arena:
        uint64_t size
        uint64_t used
        bint open
    cdef struct ofs_ring:
        ofs_arena *arenas
        uint32_t arena_count
        uint64_t size
        uint64_t used
        uint64_t peak
    uint64_t ofs_ring_round(uint64_t size)
    int ofs_ring_add(ofs_ring *ring, uint64_t size, uint32_t *arena)
    int ofs_ring_extend(ofs_ring *ring, uint32_t arena, uint64_t size)
    int ofs_ring_remove(ofs_ring *ring, uint32_t arena)
    int ofs_ring_take(ofs_ring *ring, uint64_t size, uint32_t *arena, uint64_t *offset)
    int ofs_ring_give(ofs_ring *ring, uint32_t arena, uint64_t offset, uint64_t size)
    uint64_t ofs_ring_longest(const ofs_ring *ring)
    void ofs_ring_destroy(ofs_ring *ring)

cdef extern from "ofs_hash.h" nogil:
    enum:
        OFS_HASH_LIMIT
    void ofs_hash(const void *data, size_t size, void *digest, size_t digest_size)
