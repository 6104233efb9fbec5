/* A model of weakly ordered memory: a few threads as coroutines, random interleavings, loads that may be stale.
 *
 * Each word keeps all values it had. A thread remembers how new a value of each word it must see at least (its view); a
 * release store carries the view along, an acquire load takes it over, a read-modify-write reads the newest and carries
 * on what its predecessor carried. A `seq` load sees at least the last `seq` write of that word,
 * and nothing more comes with it. Not thread-safe; one run at a time.
 */
#ifndef MODEL_MEMORY_H
#define MODEL_MEMORY_H

#include "ofs_atomic.h"

#define MODEL_THREADS 3u

/* Forget all words and views; what stands in memory now is the oldest value. All that
 * is left to chance from now on is drawn from `*random`. */
void model_reset(uint64_t *random);

/* Run `count` functions at the same time until all have returned. */
void model_run(void (*const *threads)(void), unsigned count);

#endif
