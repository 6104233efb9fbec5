/* A namespace's list of producers: entering, leaving, a full list, the epoch, and all of it at the same time. */
#include "harness.h"

#include <pthread.h>

#include "ofs_directory.h"

#define THREADS 4u

static struct ofs_directory *directory;
static uint64_t ids[OFS_ENDPOINT_LIMIT];

static void enter_and_leave(void)
{
    CHECK_EQUAL(ofs_directory_list(directory, ids), 0);
    uint32_t epoch = ofs_directory_epoch(directory);
    for (uint32_t i = 0; i < OFS_ENDPOINT_LIMIT; i++) {
        CHECK_EQUAL(ofs_directory_enter(directory, 1000 + i), OFS_OK);
        CHECK_EQUAL(ofs_directory_epoch(directory), epoch + i + 1);
    }
    CHECK_EQUAL(ofs_directory_enter(directory, 5), OFS_FULL);
    ofs_directory_leave(directory, 5); /* never entered */
    CHECK_EQUAL(ofs_directory_epoch(directory), epoch + OFS_ENDPOINT_LIMIT);
    CHECK_EQUAL(ofs_directory_list(directory, ids), OFS_ENDPOINT_LIMIT);
    CHECK(ids[0] == 1000 && ids[OFS_ENDPOINT_LIMIT - 1] == 1000 + OFS_ENDPOINT_LIMIT - 1);
    ofs_directory_leave(directory, 1500);
    CHECK_EQUAL(ofs_directory_epoch(directory), epoch + OFS_ENDPOINT_LIMIT + 1);
    CHECK_EQUAL(ofs_directory_list(directory, ids), OFS_ENDPOINT_LIMIT - 1);
    CHECK_EQUAL(ofs_directory_enter(directory, 5), OFS_OK); /* in the place that became free */
    CHECK_EQUAL(ofs_load64_acquire(&directory->endpoint[500]), 5);
    CHECK_EQUAL(ofs_directory_enter(directory, 6), OFS_FULL);
    for (uint32_t i = 0; i < OFS_ENDPOINT_LIMIT; i++)
        ofs_directory_leave(directory, i == 500 ? 5 : 1000 + i);
    CHECK_EQUAL(ofs_directory_list(directory, ids), 0);
}

static void stamps_and_bells(void)
{
    CHECK_EQUAL(ofs_directory_stamp(directory), 1); /* 0 means: no key look-up */
    CHECK_EQUAL(ofs_directory_stamp(directory), 2);
    for (uint32_t i = 0; i < OFS_BELLS; i++)
        CHECK((char *)ofs_directory_bell(directory, i) == (char *)directory + 8448 + (size_t)64 * i);
    CHECK(ofs_directory_bell(directory, OFS_BELLS) == ofs_directory_bell(directory, 0));
    CHECK(ofs_directory_bell(directory, UINT32_MAX) == ofs_directory_bell(directory, OFS_BELLS - 1));
}

struct worker {
    pthread_t thread;
    uint64_t id;
    uint64_t stamps; /* the sum of all it was given */
    uint32_t rounds;
};

static void *come_and_go(void *argument)
{
    struct worker *me = argument;
    uint64_t seen[OFS_ENDPOINT_LIMIT], last = 0;
    for (uint32_t i = 0; i < me->rounds; i++) {
        CHECK_EQUAL(ofs_directory_enter(directory, me->id), OFS_OK);
        uint32_t count = ofs_directory_list(directory, seen);
        bool found = false;
        for (uint32_t k = 0; k < count; k++) {
            CHECK(seen[k] >= 1 && seen[k] <= THREADS);
            found = found || seen[k] == me->id;
        }
        CHECK(found);
        uint64_t stamp = ofs_directory_stamp(directory);
        CHECK(stamp > last);
        last = stamp;
        me->stamps += stamp;
        ofs_directory_leave(directory, me->id);
    }
    return NULL;
}

static void at_the_same_time(uint32_t rounds)
{
    struct worker workers[THREADS];
    uint32_t epoch = ofs_directory_epoch(directory);
    uint64_t first = ofs_directory_stamp(directory), sum = 0, total = (uint64_t)rounds * THREADS;
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.id = i + 1, .rounds = rounds};
        CHECK(pthread_create(&workers[i].thread, NULL, come_and_go, &workers[i]) == 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
        sum += workers[i].stamps;
    }
    CHECK_EQUAL(sum, total * first + total * (total + 1) / 2); /* each stamp once */
    CHECK_EQUAL(ofs_directory_epoch(directory), epoch + 2 * rounds * THREADS);
    CHECK_EQUAL(ofs_directory_list(directory, ids), 0);
}

int main(void)
{
    alarm(60);
    directory = zeroed(sizeof *directory);
    ofs_directory_make(directory);
    stamps_and_bells();
    enter_and_leave();
    at_the_same_time(scaled(2000));
    free(directory);
    return 0;
}
