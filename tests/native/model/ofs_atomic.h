/* Stands in for src/ofs_atomic.h when the core is run on a model of weakly ordered memory (model/memory.c).
 *
 * Same names, same orderings; each operation goes to the model, which lets another thread run first and may answer a load
 * with any value that the C11 orderings on record do not forbid. That shows what the machine at hand never does.
 */
#ifndef OFS_ATOMIC_H
#define OFS_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

typedef uint64_t ofs_u64;
typedef uint32_t ofs_u32;

enum model_order { MODEL_RELAXED, MODEL_ACQUIRE, MODEL_RELEASE, MODEL_ACQREL, MODEL_SEQ };
enum model_change { MODEL_ADD, MODEL_AND, MODEL_OR };

uint64_t model_load(const void *word, unsigned width, enum model_order order);
void model_store(void *word, unsigned width, uint64_t value, enum model_order order);
uint64_t model_change(void *word, unsigned width, enum model_change change, uint64_t operand, enum model_order order);
bool model_cas(void *word, unsigned width, uint64_t *expected, uint64_t value, enum model_order order);

#define MODEL_LOAD(bits, name, order)                                              \
    static inline uint##bits##_t ofs_load##bits##_##name(const ofs_u##bits *word)  \
    {                                                                              \
        return (uint##bits##_t)model_load(word, bits / 8, order);                  \
    }
#define MODEL_STORE(bits, name, order)                                                     \
    static inline void ofs_store##bits##_##name(ofs_u##bits *word, uint##bits##_t value)   \
    {                                                                                      \
        model_store(word, bits / 8, value, order);                                         \
    }
#define MODEL_CHANGE(bits, verb, change, name, order)                                                  \
    static inline uint##bits##_t ofs_##verb##bits##_##name(ofs_u##bits *word, uint##bits##_t value)    \
    {                                                                                                  \
        return (uint##bits##_t)model_change(word, bits / 8, change, value, order);                     \
    }
#define MODEL_CAS(bits, name, order)                                                                                      \
    static inline bool ofs_cas##bits##_##name(ofs_u##bits *word, uint##bits##_t *expected, uint##bits##_t value)          \
    {                                                                                                                     \
        uint64_t seen = *expected;                                                                                        \
        bool done = model_cas(word, bits / 8, &seen, value, order);                                                       \
        *expected = (uint##bits##_t)seen;                                                                                 \
        return done;                                                                                                      \
    }
/* Every ordering in both widths, also those that the core does not use: a mutant may. */
#define MODEL_WIDTH(bits)                                      \
    MODEL_LOAD(bits, relaxed, MODEL_RELAXED)                   \
    MODEL_LOAD(bits, acquire, MODEL_ACQUIRE)                   \
    MODEL_LOAD(bits, seq, MODEL_SEQ)                           \
    MODEL_STORE(bits, relaxed, MODEL_RELAXED)                  \
    MODEL_STORE(bits, release, MODEL_RELEASE)                  \
    MODEL_CHANGE(bits, add, MODEL_ADD, relaxed, MODEL_RELAXED) \
    MODEL_CHANGE(bits, add, MODEL_ADD, release, MODEL_RELEASE) \
    MODEL_CHANGE(bits, and, MODEL_AND, relaxed, MODEL_RELAXED) \
    MODEL_CHANGE(bits, and, MODEL_AND, acqrel, MODEL_ACQREL)   \
    MODEL_CHANGE(bits, and, MODEL_AND, seq, MODEL_SEQ)         \
    MODEL_CHANGE(bits, or, MODEL_OR, acqrel, MODEL_ACQREL)     \
    MODEL_CHANGE(bits, or, MODEL_OR, seq, MODEL_SEQ)           \
    MODEL_CAS(bits, relaxed, MODEL_RELAXED)                    \
    MODEL_CAS(bits, acquire, MODEL_ACQUIRE)                    \
    MODEL_CAS(bits, release, MODEL_RELEASE)                    \
    MODEL_CAS(bits, acqrel, MODEL_ACQREL)                      \
    MODEL_CAS(bits, seq, MODEL_SEQ)
MODEL_WIDTH(64)
MODEL_WIDTH(32)

static inline void ofs_cpu_relax(void)
{
}

#endif
