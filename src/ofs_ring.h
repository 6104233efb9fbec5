/* Space: which bytes of a producer's data segments are in use. Private to the producing process, no atomics.
 *
 * Each data segment is an arena with a list of gaps in address order. Allocation is first fit from the lowest address of
 * the first arena, so that memory which was just given back, and is still in the CPU's caches and page tables, is used
 * again before anything colder (docs/decisions/0002). Frees come in any order and join their neighbours. The caller
 * serialises all calls.
 */
#ifndef OFS_RING_H
#define OFS_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ofs_status.h"

#define OFS_ALIGN ((uint64_t)64) /* of every block: a cache line, and the widest vector store */

struct ofs_gap {
    uint64_t offset;
    uint64_t size;
};

struct ofs_arena {
    struct ofs_gap *gaps;
    uint32_t gap_count;
    uint32_t gap_room;
    uint64_t size;
    uint64_t used;
    bool open; /* a place in the list without a segment is reused */
};

struct ofs_ring {
    struct ofs_arena *arenas;
    uint32_t arena_count;
    uint64_t size; /* of all arenas */
    uint64_t used;
    uint64_t peak; /* the most that ever was in use */
};

/* `size` rounded up to what an allocation really takes. */
uint64_t ofs_ring_round(uint64_t size);

/* Add an arena of `size` bytes, a multiple of OFS_ALIGN; its number goes to `*arena`. -ENOMEM when malloc fails. */
int ofs_ring_add(struct ofs_ring *ring, uint64_t size, uint32_t *arena);

/* The arena has `size` bytes from now on, more than before, a multiple of OFS_ALIGN. -ENOMEM when malloc fails. */
int ofs_ring_extend(struct ofs_ring *ring, uint32_t arena, uint64_t size);

/* Remove an arena without allocations; -EBUSY otherwise. */
int ofs_ring_remove(struct ofs_ring *ring, uint32_t arena);

/* Find room for `size` bytes; OFS_FULL when no gap is long enough. */
int ofs_ring_take(struct ofs_ring *ring, uint64_t size, uint32_t *arena, uint64_t *offset);

/* Give back exactly what was taken; -EINVAL when it was not (outside, or overlapping what is free). */
int ofs_ring_give(struct ofs_ring *ring, uint32_t arena, uint64_t offset, uint64_t size);

/* Longest gap, which is the largest allocation that would succeed. */
uint64_t ofs_ring_longest(const struct ofs_ring *ring);

void ofs_ring_destroy(struct ofs_ring *ring);

#endif
