/* Bells: what each call does to the word, how long a wait lasts, and that no wake-up is ever lost. */
#include "harness.h"

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#include "ofs_wait.h"

#define MS ((uint64_t)1000000)
#define NEVER UINT64_MAX
#define LONG (20000 * MS) /* longer than any run: a wait that lasts so long has lost its wake-up */
#define PAIRS 3
#define CROWD 5

static ofs_u32 bell;

static uint32_t value(void)
{
    return ofs_load32_acquire(&bell);
}

static void words(void)
{
    const struct {
        uint32_t before, rung, announced;
    } rows[] = {{0, 2, 1}, {1, 2, 1}, {2, 4, 3}, {3, 4, 3}, {0xfffffffe, 0, 0xffffffff}, {0xffffffff, 0, 0xffffffff}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ofs_store32_release(&bell, rows[i].before);
        CHECK_EQUAL(ofs_bell_read(&bell), rows[i].before);
        ofs_bell_ring_if_heard(&bell);
        CHECK_EQUAL(value(), rows[i].before & 1 ? rows[i].rung : rows[i].before);
        ofs_store32_release(&bell, rows[i].before);
        ofs_bell_ring(&bell);
        CHECK_EQUAL(value(), rows[i].rung);
        ofs_store32_release(&bell, rows[i].before);
        CHECK_EQUAL(ofs_bell_announce(&bell), rows[i].announced);
        CHECK_EQUAL(value(), rows[i].announced);
    }
}

/* Returns how long the wait lasted, in ms; `rc` is what it must answer. */
static uint64_t waited(uint32_t seen, uint64_t spin, uint64_t slice, uint64_t deadline_in, int rc)
{
    uint64_t start = ofs_now_ns();
    CHECK_EQUAL(ofs_bell_wait(&bell, seen, spin, slice, deadline_in == NEVER ? NEVER : start + deadline_in), rc);
    return (ofs_now_ns() - start) / MS;
}

static void limits(void)
{
    ofs_store32_release(&bell, 6);
    CHECK(waited(4, 0, LONG, NEVER, OFS_OK) < 5000); /* it rang already */
    CHECK(waited(4, 10 * MS, LONG, NEVER, OFS_OK) < 5000);
    CHECK_EQUAL(value(), 6); /* no sleeper was announced for nothing */
    CHECK(waited(6, 0, LONG, 30 * MS, OFS_TIMEOUT) >= 30);
    CHECK_EQUAL(value(), 7);
    CHECK(waited(6, 0, 30 * MS, NEVER, OFS_TIMEOUT) >= 30); /* bit 0 alone is no ring */
    CHECK(waited(7, 0, 30 * MS, LONG, OFS_TIMEOUT) < 5000);
    CHECK(waited(7, LONG, 30 * MS, LONG, OFS_TIMEOUT) < 5000); /* the spin ends with the slice */
    CHECK(waited(7, LONG, LONG, 30 * MS, OFS_TIMEOUT) < 5000);
    CHECK(waited(7, 0, LONG, 0, OFS_TIMEOUT) < 5000);
    CHECK_EQUAL(ofs_bell_wait(&bell, 7, MS, LONG, 1), OFS_TIMEOUT); /* long past */
    CHECK(waited(6, MS, NEVER, 30 * MS, OFS_TIMEOUT) >= 30);
    CHECK(waited(5, 0, LONG, NEVER, OFS_OK) < 5000);
}

static void on_alarm(int number)
{
    (void)number;
}

static void signals_end_a_wait(void)
{
    struct sigaction old, action = {.sa_handler = on_alarm};
    struct itimerval soon = {.it_interval.tv_usec = 20000, .it_value.tv_usec = 20000}, off = {.it_value.tv_usec = 0};
    ofs_store32_release(&bell, 0);
    CHECK(sigaction(SIGALRM, &action, &old) == 0 && setitimer(ITIMER_REAL, &soon, NULL) == 0);
    CHECK(waited(0, 0, LONG, LONG, OFS_INTERRUPTED) < 5000);
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0 && sigaction(SIGALRM, &old, NULL) == 0);
    alarm(60);
}

struct pair {
    ofs_u32 ping, pong;
    uint32_t sent, answered; /* plain: ordered by the bells alone */
    uint32_t rounds;
    uint64_t spin;
};

/* Wait until the other side's plain counter has come; only the bell orders the two. */
static void until(ofs_u32 *from, uint32_t *seen, uint64_t spin)
{
    uint32_t now;
    while ((now = ofs_bell_read(from)) >> 1 == *seen >> 1)
        CHECK_EQUAL(ofs_bell_wait(from, now, spin, LONG, ofs_now_ns() + LONG), OFS_OK);
    *seen = now;
}

static void *answer(void *argument)
{
    struct pair *pair = argument;
    uint32_t seen = 0;
    for (uint32_t i = 1; i <= pair->rounds; i++) {
        until(&pair->ping, &seen, pair->spin);
        CHECK_EQUAL(pair->sent, i);
        pair->answered = i;
        ofs_bell_ring(&pair->pong);
    }
    return NULL;
}

static void *ask(void *argument)
{
    struct pair *pair = argument;
    uint32_t seen = 0;
    for (uint32_t i = 1; i <= pair->rounds; i++) {
        pair->sent = i;
        ofs_bell_ring(&pair->ping);
        until(&pair->pong, &seen, pair->spin);
        CHECK_EQUAL(pair->answered, i);
    }
    return NULL;
}

static void ping_pong(uint32_t rounds)
{
    static struct pair pairs[PAIRS];
    pthread_t threads[2 * PAIRS];
    for (uint32_t i = 0; i < PAIRS; i++) {
        pairs[i].rounds = rounds;
        pairs[i].spin = i == 0 ? 0 : i * 5000;
        CHECK(pthread_create(&threads[2 * i], NULL, answer, &pairs[i]) == 0);
        CHECK(pthread_create(&threads[2 * i + 1], NULL, ask, &pairs[i]) == 0);
    }
    for (uint32_t i = 0; i < 2 * PAIRS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Many sleepers on one bell: each ring must reach all of them. */
static struct {
    ofs_u32 bell, back;
    ofs_u32 generation;
    ofs_u64 arrived;
    uint32_t rounds;
} crowd;

static void *listen(void *argument)
{
    (void)argument;
    for (uint32_t want = 1; want <= crowd.rounds; want++) {
        for (;;) {
            uint32_t seen = ofs_bell_read(&crowd.bell);
            if (ofs_load32_acquire(&crowd.generation) >= want)
                break;
            CHECK_EQUAL(ofs_bell_wait(&crowd.bell, seen, 0, LONG, ofs_now_ns() + LONG), OFS_OK);
        }
        ofs_add64_relaxed(&crowd.arrived, 1);
        ofs_bell_ring(&crowd.back);
    }
    return NULL;
}

static void all_are_woken(uint32_t rounds)
{
    pthread_t threads[CROWD];
    crowd.rounds = rounds;
    for (uint32_t i = 0; i < CROWD; i++)
        CHECK(pthread_create(&threads[i], NULL, listen, NULL) == 0);
    for (uint32_t round = 1; round <= rounds; round++) {
        ofs_store32_release(&crowd.generation, round);
        ofs_bell_ring(&crowd.bell);
        for (;;) {
            uint32_t seen = ofs_bell_read(&crowd.back);
            if (ofs_load64_acquire(&crowd.arrived) == (uint64_t)round * CROWD)
                break;
            CHECK_EQUAL(ofs_bell_wait(&crowd.back, seen, 0, LONG, ofs_now_ns() + LONG), OFS_OK);
        }
    }
    for (uint32_t i = 0; i < CROWD; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A sleeper is really asleep when it is rung: what spinning and a late look would hide. */
static void *ring_late(void *argument)
{
    (void)argument;
    while (!(value() & 1)) /* until the sleeper is announced */
        ofs_cpu_relax();
    usleep(20000);
    ofs_bell_ring(&bell);
    return NULL;
}

static void a_sleeper_wakes(void)
{
    for (int i = 0; i < 5; i++) {
        pthread_t thread;
        ofs_store32_release(&bell, 0);
        CHECK(pthread_create(&thread, NULL, ring_late, NULL) == 0);
        CHECK_EQUAL(ofs_bell_wait(&bell, 0, 0, 5000 * MS, NEVER), OFS_OK);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK_EQUAL(value(), 2);
    }
}

int main(void)
{
    alarm(60);
    words();
    limits();
    signals_end_a_wait();
    a_sleeper_wakes();
    ping_pong(scaled(6000));
    all_are_woken(scaled(2000));
    return 0;
}
