#include "ofs_ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint64_t ofs_ring_round(uint64_t size)
{
    if (size > UINT64_MAX - OFS_ALIGN)
        return UINT64_MAX & ~(OFS_ALIGN - 1); /* larger than any segment: refused, where a wrap to 0 would fit anywhere */
    return size == 0 ? OFS_ALIGN : (size + OFS_ALIGN - 1) & ~(OFS_ALIGN - 1);
}

static int make_room(struct ofs_arena *arena)
{
    if (arena->gap_count < arena->gap_room)
        return OFS_OK;
    uint32_t room = arena->gap_room ? arena->gap_room * 2 : 16;
    struct ofs_gap *gaps = realloc(arena->gaps, room * sizeof *gaps);
    if (gaps == NULL)
        return -ENOMEM;
    arena->gaps = gaps;
    arena->gap_room = room;
    return OFS_OK;
}

int ofs_ring_add(struct ofs_ring *ring, uint64_t size, uint32_t *number)
{
    uint32_t at = 0;
    while (at < ring->arena_count && ring->arenas[at].open)
        at++;
    if (at == ring->arena_count) {
        struct ofs_arena *arenas = realloc(ring->arenas, (at + 1) * sizeof *arenas);
        if (arenas == NULL)
            return -ENOMEM;
        ring->arenas = arenas;
        memset(&arenas[at], 0, sizeof arenas[at]);
        ring->arena_count++;
    }
    struct ofs_arena *arena = &ring->arenas[at];
    if (make_room(arena) != OFS_OK)
        return -ENOMEM;
    arena->gaps[0] = (struct ofs_gap){.offset = 0, .size = size};
    arena->gap_count = size ? 1 : 0;
    arena->size = size;
    arena->used = 0;
    arena->open = true;
    ring->size += size;
    *number = at;
    return OFS_OK;
}

int ofs_ring_extend(struct ofs_ring *ring, uint32_t number, uint64_t size)
{
    if (number >= ring->arena_count || !ring->arenas[number].open || size < ring->arenas[number].size)
        return -EINVAL;
    struct ofs_arena *arena = &ring->arenas[number];
    uint64_t more = size - arena->size;
    struct ofs_gap *last = arena->gap_count ? &arena->gaps[arena->gap_count - 1] : NULL;
    if (last && last->offset + last->size == arena->size) {
        last->size += more;
    } else if (more) {
        if (make_room(arena) != OFS_OK)
            return -ENOMEM;
        arena->gaps[arena->gap_count++] = (struct ofs_gap){.offset = arena->size, .size = more};
    }
    arena->size = size;
    ring->size += more;
    return OFS_OK;
}

int ofs_ring_remove(struct ofs_ring *ring, uint32_t number)
{
    if (number >= ring->arena_count || !ring->arenas[number].open)
        return -EINVAL;
    struct ofs_arena *arena = &ring->arenas[number];
    if (arena->used != 0)
        return -EBUSY;
    ring->size -= arena->size;
    arena->size = 0;
    arena->gap_count = 0;
    arena->open = false;
    return OFS_OK;
}

static void cut(struct ofs_arena *arena, uint32_t at, uint64_t size)
{
    struct ofs_gap *gap = &arena->gaps[at];
    gap->offset += size;
    gap->size -= size;
    if (gap->size == 0) {
        memmove(gap, gap + 1, (arena->gap_count - at - 1) * sizeof *gap);
        arena->gap_count--;
    }
    arena->used += size;
}

int ofs_ring_take(struct ofs_ring *ring, uint64_t size, uint32_t *number, uint64_t *offset)
{
    size = ofs_ring_round(size);
    for (uint32_t a = 0; a < ring->arena_count; a++) {
        struct ofs_arena *arena = &ring->arenas[a];
        if (arena->size - arena->used < size)
            continue;
        for (uint32_t g = 0; g < arena->gap_count; g++) {
            if (arena->gaps[g].size < size)
                continue;
            *number = a;
            *offset = arena->gaps[g].offset;
            cut(arena, g, size);
            ring->used += size;
            if (ring->used > ring->peak)
                ring->peak = ring->used;
            return OFS_OK;
        }
    }
    return OFS_FULL;
}

/* Index of the first gap behind `offset`. */
static uint32_t gap_after(const struct ofs_arena *arena, uint64_t offset)
{
    uint32_t low = 0, high = arena->gap_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (arena->gaps[middle].offset > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

int ofs_ring_give(struct ofs_ring *ring, uint32_t number, uint64_t offset, uint64_t size)
{
    size = ofs_ring_round(size);
    if (number >= ring->arena_count || !ring->arenas[number].open)
        return -EINVAL;
    struct ofs_arena *arena = &ring->arenas[number];
    if (size > arena->used || offset > arena->size || size > arena->size - offset)
        return -EINVAL;
    uint32_t at = gap_after(arena, offset);
    struct ofs_gap *before = at > 0 ? &arena->gaps[at - 1] : NULL;
    struct ofs_gap *after = at < arena->gap_count ? &arena->gaps[at] : NULL;
    if ((before && before->offset + before->size > offset) || (after && offset + size > after->offset))
        return -EINVAL; /* given back twice: going on would hand the same bytes to two payloads */
    bool joins_before = before && before->offset + before->size == offset;
    bool joins_after = after && offset + size == after->offset;
    if (joins_before && joins_after) {
        before->size += size + after->size;
        memmove(after, after + 1, (arena->gap_count - at - 1) * sizeof *after);
        arena->gap_count--;
    } else if (joins_before) {
        before->size += size;
    } else if (joins_after) {
        after->offset = offset;
        after->size += size;
    } else {
        if (make_room(arena) != OFS_OK)
            return -ENOMEM;
        memmove(&arena->gaps[at + 1], &arena->gaps[at], (arena->gap_count - at) * sizeof *arena->gaps);
        arena->gaps[at] = (struct ofs_gap){.offset = offset, .size = size};
        arena->gap_count++;
    }
    arena->used -= size;
    ring->used -= size;
    return OFS_OK;
}

uint64_t ofs_ring_longest(const struct ofs_ring *ring)
{
    uint64_t longest = 0;
    for (uint32_t a = 0; a < ring->arena_count; a++)
        for (uint32_t g = 0; g < ring->arenas[a].gap_count; g++)
            if (ring->arenas[a].gaps[g].size > longest)
                longest = ring->arenas[a].gaps[g].size;
    return longest;
}

void ofs_ring_destroy(struct ofs_ring *ring)
{
    for (uint32_t a = 0; a < ring->arena_count; a++)
        free(ring->arenas[a].gaps);
    free(ring->arenas);
    memset(ring, 0, sizeof *ring);
}
