/* What every function of the core answers: one list, zero is success, positive is "not now", negative is an errno.
 *
 * System failures travel as their negative errno, so that one place (`_check` in _core.pyx) can name them.
 */
#ifndef OFS_STATUS_H
#define OFS_STATUS_H

#define OFS_OK 0
#define OFS_GONE 1        /* the block was taken, cancelled, or now carries another payload */
#define OFS_FULL 2        /* no free slot, no free descriptor */
#define OFS_BUSY 3        /* another process holds the lock */
#define OFS_TIMEOUT 4     /* the time ran out */
#define OFS_INTERRUPTED 5 /* a signal came: look at it, then wait on with the same deadline */
#define OFS_ABSENT 6      /* nothing under that key */

#endif
