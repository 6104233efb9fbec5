/* Atomic words shared between processes. The only file that includes <stdatomic.h>.
 *
 * The ordering stands in each name and on the operation itself: no fences, no volatile, so that ThreadSanitizer and
 * a weakly ordered CPU see exactly what is meant. `_seq` is used only where a store must not pass a later load of
 * another word (the "space" label, docs/memory-order.md); everything else gets by with acquire and release.
 */
#ifndef OFS_ATOMIC_H
#define OFS_ATOMIC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef _Atomic uint64_t ofs_u64;
typedef _Atomic uint32_t ofs_u32;

/* A lock hidden inside an "atomic" would live in one process only. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics must work across processes");

static inline uint64_t ofs_load64_acquire(const ofs_u64 *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline uint64_t ofs_load64_relaxed(const ofs_u64 *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline uint64_t ofs_load64_seq(const ofs_u64 *word)
{
    return atomic_load_explicit(word, memory_order_seq_cst);
}

static inline void ofs_store64_release(ofs_u64 *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline uint64_t ofs_add64_relaxed(ofs_u64 *word, uint64_t value)
{
    return atomic_fetch_add_explicit(word, value, memory_order_relaxed);
}

static inline uint64_t ofs_and64_seq(ofs_u64 *word, uint64_t mask)
{
    return atomic_fetch_and_explicit(word, mask, memory_order_seq_cst);
}

static inline bool ofs_cas64_acqrel(ofs_u64 *word, uint64_t *expected, uint64_t value)
{
    return atomic_compare_exchange_strong_explicit(word, expected, value, memory_order_acq_rel, memory_order_acquire);
}

static inline bool ofs_cas64_seq(ofs_u64 *word, uint64_t *expected, uint64_t value)
{
    return atomic_compare_exchange_strong_explicit(word, expected, value, memory_order_seq_cst, memory_order_acquire);
}

static inline uint32_t ofs_load32_acquire(const ofs_u32 *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline uint32_t ofs_load32_seq(const ofs_u32 *word)
{
    return atomic_load_explicit(word, memory_order_seq_cst);
}

static inline void ofs_store32_release(ofs_u32 *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline uint32_t ofs_add32_release(ofs_u32 *word, uint32_t value)
{
    return atomic_fetch_add_explicit(word, value, memory_order_release);
}

static inline uint32_t ofs_or32_seq(ofs_u32 *word, uint32_t bits)
{
    return atomic_fetch_or_explicit(word, bits, memory_order_seq_cst);
}

static inline uint32_t ofs_and32_acqrel(ofs_u32 *word, uint32_t mask)
{
    return atomic_fetch_and_explicit(word, mask, memory_order_acq_rel);
}

static inline bool ofs_cas32_acqrel(ofs_u32 *word, uint32_t *expected, uint32_t value)
{
    return atomic_compare_exchange_strong_explicit(word, expected, value, memory_order_acq_rel, memory_order_acquire);
}

static inline void ofs_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield"); /* a hint only: it orders nothing */
#endif
}

#endif
