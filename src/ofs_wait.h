/* Bells: one 32-bit word on which processes sleep until something happens. The only blocking call of the core.
 *
 * Bit 0 says that somebody sleeps, the rest counts rings. The bit is cleared by the ring that wakes, and a waiter sets
 * it anew before it sleeps again: a waiter that was killed costs one needless wake-up and nothing more, where a count
 * of waiters would stay wrong for ever. Ringing is lock-free, waiting sleeps in the kernel.
 */
#ifndef OFS_WAIT_H
#define OFS_WAIT_H

#include "ofs_atomic.h"
#include "ofs_status.h"

/* Count one ring and wake all sleepers; no system call when nobody sleeps. */
void ofs_bell_ring(ofs_u32 *bell);

/* Ring only if somebody sleeps. The caller's preceding change must have been made with a `_seq` operation. */
void ofs_bell_ring_if_heard(ofs_u32 *bell);

/* What the bell shows now; whatever was published before the ring that made it so is visible after (label: arrival). */
uint32_t ofs_bell_read(const ofs_u32 *bell);

/* Announce a sleeper before the last look at the condition (label: space). Returns the value to sleep on. */
uint32_t ofs_bell_announce(ofs_u32 *bell);

/* Spin for up to `spin_ns`, then sleep, until the bell shows something else than `seen` or `deadline_ns`
 * (CLOCK_MONOTONIC; UINT64_MAX = none) has come, but not longer than `slice_ns`, after which the caller looks around.
 * Returns OFS_OK, OFS_TIMEOUT (deadline or slice) or OFS_INTERRUPTED. */
int ofs_bell_wait(ofs_u32 *bell, uint32_t seen, uint64_t spin_ns, uint64_t slice_ns, uint64_t deadline_ns);

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t ofs_now_ns(void);

/* The same, a few milliseconds late, at a quarter of the time. */
uint64_t ofs_about_now_ns(void);

#endif
