/* Lives of blocks: publish, hold, take, release, cancel, reap. docs/protocol.md has a row per state of the word.
 *
 * Every function works on the producer's control segment, from any process, without a lock and without waiting; a
 * compare-and-swap is repeated only when somebody else made progress (lock-free). Whoever dies between two calls leaves
 * a state that the others can go on from: bits of dead readers are cleared by `ofs_reader_clear`. Calls of one process with
 * one slot must not overlap (the GIL sees to that): they share the slot's bit.
 */
#ifndef OFS_BLOCK_H
#define OFS_BLOCK_H

#include <stdbool.h>

#include "ofs_layout.h"

/* What a request is known by: hashes of the edge and of the request id. */
struct ofs_key {
    uint64_t edge;
    uint64_t request_high;
    uint64_t request_low;
};

/* The constant part of a published block. */
struct ofs_content {
    struct ofs_key key;
    uint64_t offset;
    uint64_t frame_size;
    uint64_t total_size;
    uint64_t stamp;
    uint64_t published_ns;
    uint32_t segment;
    uint32_t flags;
};

/* Make a fresh, zeroed control segment valid; the last store is the magic word. */
void ofs_control_make(struct ofs_control *control, uint64_t endpoint, uint32_t key_slots, uint64_t orphan_ttl_ns,
                      uint64_t pid);

/* May this mapping of `size` bytes be used as a control segment? Whatever its words say later, no function leaves it. */
bool ofs_control_valid(const struct ofs_control *control, uint64_t size);

/* Bytes of any control segment; most of them never get memory. */
uint64_t ofs_control_size(void);

/* How many of them need memory at once: the header, and a key table of so many entries. */
uint64_t ofs_control_fixed_size(uint32_t key_slots);

/* Where descriptor `index` begins. */
uint64_t ofs_block_offset(uint32_t index);

struct ofs_block *ofs_block_at(struct ofs_control *control, uint32_t index);

/* Descriptors that exist, never more than fit, whatever the shared word says. */
uint32_t ofs_blocks_ready(const struct ofs_control *control);

/* Producer: descriptors below `count` are backed by memory now. */
void ofs_blocks_extend(struct ofs_control *control, uint32_t count);

bool ofs_block_free(const struct ofs_block *block);
bool ofs_block_pending(const struct ofs_block *block);

/* Holder bits of the block; for reports and for finding blocks that keep a segment. */
uint32_t ofs_block_holders(const struct ofs_block *block);

/* Number of the block's present publication, and the takes it has left. */
uint64_t ofs_block_sequence(const struct ofs_block *block);
uint32_t ofs_block_takes(const struct ofs_block *block);

/* Producer: publish the bytes already written. The block must be free. */
void ofs_block_publish(struct ofs_block *block, const struct ofs_content *content, uint64_t sequence, uint32_t takers);

/* The constant part; only meaningful while a bit or a take of this publication keeps the block. */
void ofs_block_read(const struct ofs_block *block, struct ofs_content *content);

/* Consumer: set slot's bit if the block still is that publication and has a take left; then read its content. */
int ofs_block_hold(struct ofs_control *control, uint32_t index, uint64_t sequence, uint32_t slot,
                   struct ofs_content *content);

/* Consumer, holding: use up one take. OFS_GONE when others, or a cancellation, were faster. */
int ofs_block_take(struct ofs_control *control, uint32_t index);

/* Consumer: clear slot's bit and wake the producer if it waits for room. */
void ofs_block_release(struct ofs_control *control, uint32_t index, uint32_t slot);

/* Anyone: drop the takes that are left, if the block still is that publication. OFS_OK when there were any. */
int ofs_block_cancel(struct ofs_control *control, uint32_t index, uint64_t sequence);

/* Anyone: drop the takes left of all blocks of this request, on all edges. Returns how many blocks. */
uint32_t ofs_request_cancel(struct ofs_control *control, uint64_t request_high, uint64_t request_low);

/* Whoever holds the lock of `slot`, so that nobody sets its bit meanwhile: clear it in all blocks. */
void ofs_reader_clear(struct ofs_control *control, uint32_t slot);

/* Mark a slot as in use (before its first bit) or unused (after its last). */
void ofs_reader_mark(struct ofs_control *control, uint32_t slot, uint64_t pid);
void ofs_reader_unmark(struct ofs_control *control, uint32_t slot);
uint32_t ofs_readers(const struct ofs_control *control);

/* Producer: a data segment was given up; consumers drop what they have mapped and do not use. */
void ofs_segment_retired(struct ofs_control *control);
uint32_t ofs_segments_retired(const struct ofs_control *control);

/* Producer, or its heir: nothing more will come from here. */
void ofs_control_close(struct ofs_control *control);
bool ofs_control_closed(const struct ofs_control *control);

/* Note that the producer was found dead now, unless somebody did before; returns when that was. */
uint64_t ofs_control_died(struct ofs_control *control);

uint64_t ofs_control_orphan_ttl(const struct ofs_control *control);
uint64_t ofs_control_endpoint(const struct ofs_control *control);

/* The key table, and how many entries it has: never more than fit, 0 when the shared word is no power of two. */
ofs_u64 *ofs_control_keys(struct ofs_control *control);
uint32_t ofs_control_key_slots(const struct ofs_control *control);


ofs_u32 *ofs_control_space(struct ofs_control *control);

#endif
