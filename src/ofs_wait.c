#define _GNU_SOURCE
#include "ofs_wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ofs_fault.h"

#define ASLEEP 1u

uint64_t ofs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t ofs_about_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void wake_all(ofs_u32 *bell)
{
    /* Not FUTEX_PRIVATE: the sleepers are in other processes. */
    (void)OFS_VISIBLE("sleepers", syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0));
}

void ofs_bell_ring(ofs_u32 *bell)
{
    uint32_t seen = ofs_load32_acquire(bell);
    /* arrival: everything published before this exchange is visible to whoever reads the new count. */
    while (!ofs_cas32_acqrel(bell, &seen, (seen + 2) & ~ASLEEP))
        ;
    if (seen & ASLEEP)
        wake_all(bell);
}

void ofs_bell_ring_if_heard(ofs_u32 *bell)
{
    /* space: ordered after the caller's change of a block word; see docs/memory-order.md. */
    if (ofs_load32_seq(bell) & ASLEEP)
        ofs_bell_ring(bell);
}

uint32_t ofs_bell_read(const ofs_u32 *bell)
{
    return ofs_load32_acquire(bell); /* arrival */
}

uint32_t ofs_bell_announce(ofs_u32 *bell)
{
    return ofs_or32_seq(bell, ASLEEP) | ASLEEP; /* space */
}

static int sleep_on(ofs_u32 *bell, uint32_t seen, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    /* WAIT_BITSET takes an absolute monotonic time: an interrupted wait goes on with the same end. */
    if (syscall(SYS_futex, bell, FUTEX_WAIT_BITSET, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY) == 0 || errno == EAGAIN)
        return OFS_OK;
    if (errno == ETIMEDOUT)
        return OFS_TIMEOUT;
    return errno == EINTR ? OFS_INTERRUPTED : -errno;
}

int ofs_bell_wait(ofs_u32 *bell, uint32_t seen, uint64_t spin_ns, uint64_t slice_ns, uint64_t deadline_ns)
{
    uint64_t now = ofs_now_ns();
    uint64_t until = deadline_ns > now && deadline_ns - now > slice_ns ? now + slice_ns : deadline_ns;
    uint64_t spin_until = now + spin_ns < until ? now + spin_ns : until;
    while (spin_ns && ofs_now_ns() < spin_until) {
        for (int i = 0; i < 16; i++) {
            if ((ofs_load32_acquire(bell) | ASLEEP) != (seen | ASLEEP))
                return OFS_OK;
            ofs_cpu_relax();
        }
    }
    uint32_t expected = seen;
    if (!(seen & ASLEEP) && !ofs_cas32_acqrel(bell, &expected, seen | ASLEEP) && expected != (seen | ASLEEP))
        return OFS_OK;
    return sleep_on(bell, seen | ASLEEP, until);
}
