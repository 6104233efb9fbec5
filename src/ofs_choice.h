/* Which of two ways of doing the same takes less time here, found out by trying both now and then.
 *
 * For what cannot be asked: it depends on the CPU, on what its caches hold, and on which core the reader runs.
 * Nothing here blocks, allocates or looks at a clock; any thread may call it, with no lock held. Threads that do so at the
 * same time may lose a cost or cut a try short. Then the answer is found later; both ways are right at any time.
 */
#ifndef OFS_CHOICE_H
#define OFS_CHOICE_H

#include <stdbool.h>

#include "ofs_atomic.h"

/* A try is so many calls of the way that was kept, then as many of the other one. The first half of each is not judged:
 * it finds the caches as the other way left them. Of the rest the cheapest call counts, for any other may have waited. */
#define OFS_TRY 8u
#define OFS_TRY_JUDGED 4u
/* Calls from a try to the next: few after the answer has changed, then twice as many each time, up to the most. */
#define OFS_REST_LEAST 64u

/* All zero at first: way 0 is kept. */
struct ofs_choice {
    ofs_u64 turn; /* calls since the try began */
    ofs_u64 kept;
    ofs_u64 rest;
    ofs_u64 cheapest[2]; /* in this try, by way; 0: not known */
};

struct ofs_turn {
    unsigned way; /* 0 or 1 */
    bool judged;  /* say what it cost */
};

/* Which way this call goes. A change of what is better is found after `most` calls and a try. */
struct ofs_turn ofs_choice_next(struct ofs_choice *choice, uint64_t most);

/* What a judged call cost, in any unit, as long as it is the same one. */
void ofs_choice_cost(struct ofs_choice *choice, unsigned way, uint64_t cost);

#endif
