/* What all harnesses share: checks that say where, a reproducible random source, memory that looks like a fresh segment.
 *
 * A harness is a plain program without Python: it ends with 0, or prints what was wrong and ends with 1. `alarm` ends
 * one that hangs, so that a lost wake-up is a failure and not a stuck run.
 */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ofs_keys.h"

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);         \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

#define CHECK_EQUAL(got, wanted)                                                                               \
    do {                                                                                                       \
        uint64_t got_ = (uint64_t)(got), wanted_ = (uint64_t)(wanted);                                         \
        if (got_ != wanted_) {                                                                                 \
            fprintf(stderr, "%s:%d: %s is %#llx, not %#llx\n", __FILE__, __LINE__, #got,                       \
                    (unsigned long long)got_, (unsigned long long)wanted_);                                    \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

/* xorshift64*: the same steps in every run, so that a failure comes again. */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

static inline uint32_t below(uint64_t *state, uint32_t limit)
{
    return (uint32_t)((next_random(state) >> 32) % limit);
}

static inline uint64_t word_of(uint64_t generation, uint64_t pending, uint64_t holders)
{
    return generation << 40 | pending << 32 | holders;
}

static inline void *zeroed(size_t size)
{
    void *memory = calloc(1, size);
    CHECK(memory != NULL);
    return memory;
}

/* A fresh control segment with `blocks` usable descriptors. */
static inline struct ofs_control *fresh_control(uint32_t key_slots, uint32_t blocks)
{
    struct ofs_control *control = zeroed(ofs_control_size());
    ofs_control_make(control, 77, key_slots, 1000, 42);
    ofs_blocks_extend(control, blocks);
    return control;
}

/* The same anew; only what such a small one uses is cleared, for the tables are large. */
static inline void clear_control(struct ofs_control *control, uint32_t key_slots, uint32_t blocks)
{
    memset((void *)control, 0, ofs_control_fixed_size(key_slots));
    memset((void *)ofs_block_at(control, 0), 0, blocks * sizeof(struct ofs_block));
}

/* How long a part may take; sanitizers make everything some ten times slower. */
static inline uint32_t scaled(uint32_t rounds)
{
#if defined(__SANITIZE_THREAD__)
    return rounds / 10;
#elif defined(__SANITIZE_ADDRESS__)
    return rounds / 2;
#else
    return rounds;
#endif
}

#endif
