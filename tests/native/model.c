/* The core's protocols on a model of weakly ordered memory: what x86 and ThreadSanitizer cannot show.
 *
 * Each scenario is a few lines per thread, run under thousands of random interleavings and permitted stale loads.
 */
#include "harness.h"

#include <string.h>

#include "memory.h"
#include "ofs_directory.h"
#include "ofs_wait.h"

#define SLOTS 4u
#define RUNS 4000u

static struct ofs_control *control;
static struct ofs_block *block;
static ofs_u64 payload;        /* stands for payload bytes */

static const struct ofs_key key_a = {.edge = 0, .request_low = 1}, key_b = {.edge = 0, .request_low = 2};

static uint32_t seen_bell;
static bool found_nothing, other_flag;

static struct ofs_content content_of(const struct ofs_key *key, uint64_t sequence)
{
    return (struct ofs_content){.key = *key, .offset = sequence, .stamp = sequence};
}

static void publish(const struct ofs_key *key, uint64_t sequence)
{
    struct ofs_content content = content_of(key, sequence);
    ofs_store64_relaxed(&payload, sequence);
    ofs_block_publish(block, &content, sequence, 1);
}

static void start_free(void)
{
}

static void start_pending(void)
{
    publish(&key_a, 5);
    ofs_keys_insert(control, &key_a, 0);
}

static void start_held(void)
{
    struct ofs_content content;
    start_pending();
    CHECK_EQUAL(ofs_block_hold(control, 0, 5, 2, &content), OFS_OK);
    CHECK_EQUAL(ofs_block_take(control, 0), OFS_OK);
}

/* space: a producer that found no room sleeps only if whoever makes room will see that it does. */
static void wait_for_room(void)
{
    seen_bell = ofs_bell_announce(&control->space);
    found_nothing = !ofs_block_free(block);
}
static void release(void)
{
    ofs_block_release(control, 0, 2);
}
static void clear_reader(void)
{
    ofs_reader_clear(control, 2);
}
static void cancel(void)
{
    ofs_block_cancel(control, 0, 5);
}
static void no_lost_wake_up(void)
{
    CHECK(!found_nothing || ofs_load32_acquire(&control->space) != seen_bell); /* else it sleeps, and room is there */
}

/* released: once the block is free, the producer may overwrite what the reader looked at. */
static void read_and_release(void)
{
    other_flag = ofs_load64_relaxed(&payload) == 5;
    ofs_block_release(control, 0, 2);
}
static void reuse_if_free(void)
{
    if (ofs_block_free(block))
        ofs_store64_relaxed(&payload, 6);
}
static void reader_saw_its_own(void)
{
    CHECK(other_flag);
}

/* published: who holds a block sees its bytes and its content. */
static void publish_7(void)
{
    publish(&key_a, 7);
}
static void hold_and_read(void)
{
    struct ofs_content content;
    if (ofs_block_hold(control, 0, 7, 2, &content) == OFS_OK) {
        CHECK_EQUAL(ofs_load64_relaxed(&payload), 7);
        CHECK_EQUAL(content.stamp, 7);
        CHECK_EQUAL(content.offset, 7);
    }
}

/* arrival: a consumer that found nothing sleeps only if the ring for what it missed is still to come. */
static void publish_and_ring(void)
{
    publish(&key_a, 7);
    ofs_keys_insert(control, &key_a, 0);
    ofs_bell_ring(&control->space);
}
static void look_after_bell(void)
{
    struct ofs_content content;
    seen_bell = ofs_bell_read(&control->space);
    found_nothing = ofs_block_hold(control, 0, 7, 2, &content) != OFS_OK;
}
static void look_by_key_after_bell(void)
{
    struct ofs_found found;
    seen_bell = ofs_bell_read(&control->space);
    found_nothing = ofs_keys_find(control, &key_a, &found) != OFS_OK;
}

/* A stale handle whose generation has come round again between the look and the swap: the sequence decides. */
static void hold_stale(void)
{
    struct ofs_content content;
    if (ofs_block_hold(control, 0, 5, 2, &content) == OFS_OK) {
        CHECK_EQUAL(content.stamp, 5);
        other_flag = true;
    }
}
static void publish_with_the_same_word(void)
{
    uint64_t word = ofs_load64_acquire(&block->word);
    if (word & 4 || !ofs_cas64_acqrel(&block->word, &word, word_of((word >> 40) - 1, 0, 0)))
        return; /* held: not free */
    publish(&key_a, 6);
}
static void only_the_right_one_is_held(void)
{
    CHECK_EQUAL(ofs_block_holders(block), other_flag ? 4 : 0);
    CHECK_EQUAL(ofs_block_takes(block), 1);
}
/* content: what a look-up answers belongs to one life of the block. */
static void live_anew(void)
{
    for (uint64_t sequence = 6; sequence < 9; sequence++) {
        if (ofs_block_cancel(control, 0, sequence - 1) != OFS_OK)
            return;
        ofs_keys_remove(control, sequence & 1 ? &key_b : &key_a, 0);
        const struct ofs_key *key = sequence & 1 ? &key_a : &key_b;
        publish(key, sequence);
        ofs_keys_insert(control, key, 0);
    }
}
static void find_a(void)
{
    struct ofs_found found;
    if (ofs_keys_find(control, &key_a, &found) == OFS_OK) {
        CHECK_EQUAL(found.stamp, found.sequence);
        CHECK(found.sequence & 1); /* those of key b are even */
    }
}
static void cancel_older_a(void)
{
    ofs_keys_cancel_older(control, &key_a, 7); /* only 5: 6 has another key, 7 is not older */
}
static void cancel_request_a(void)
{
    ofs_request_cancel(control, key_a.request_high, key_a.request_low);
}
static void only_a_is_cancelled(void)
{
    /* live_anew ends early only where somebody else cancelled the life that was current; 6 and 8 are key b's. */
    CHECK(ofs_block_sequence(block) != 6 || ofs_block_pending(block));
    CHECK(ofs_block_sequence(block) != 8 || ofs_block_pending(block));
}
static void only_5_is_cancelled(void)
{
    CHECK(ofs_block_sequence(block) == 5 || ofs_block_sequence(block) == 8);
}

/* Two takers of one take; a taker and a cancellation: never more than there was. */
static uint32_t taken;
static void take(void)
{
    taken += ofs_block_take(control, 0) == OFS_OK;
}
static void cancel_5(void)
{
    taken += ofs_block_cancel(control, 0, 5) == OFS_OK;
}
static void taken_once(void)
{
    CHECK_EQUAL(taken, 1);
    CHECK_EQUAL(ofs_block_takes(block), 0);
}

/* Two rings at once are two. */
static void ring(void)
{
    ofs_bell_ring(&control->space);
}
static void rang_twice(void)
{
    CHECK_EQUAL(ofs_load32_acquire(&control->space), 4);
}

/* A process takes a slot over: it is marked before the first bit, so that a reap cannot miss the bit. */
static void mark_and_hold(void)
{
    struct ofs_content content;
    ofs_reader_mark(control, 2, 1);
    ofs_block_hold(control, 0, 5, 2, &content);
}
static void bit_implies_mark(void)
{
    if (ofs_block_holders(block))
        CHECK(ofs_readers(control) & 4);
}

static const struct {
    const char *what;
    void (*start)(void);
    void (*threads[MODEL_THREADS])(void);
    void (*check)(void);
} scenarios[] = {
    {"space: release", start_held, {release, wait_for_room}, no_lost_wake_up},
    {"space: dead reader", start_held, {clear_reader, wait_for_room}, no_lost_wake_up},
    {"space: cancel", start_pending, {cancel, wait_for_room}, no_lost_wake_up},
    {"released", start_held, {read_and_release, reuse_if_free}, reader_saw_its_own},
    {"published", start_free, {publish_7, hold_and_read}, NULL},
    {"arrival", start_free, {publish_and_ring, look_after_bell}, no_lost_wake_up},
    {"arrival: by key", start_free, {publish_and_ring, look_by_key_after_bell}, no_lost_wake_up},
    {"arrival: two rings", start_free, {ring, ring}, rang_twice},
    {"stale: generation came round", start_pending, {hold_stale, publish_with_the_same_word}, only_the_right_one_is_held},
    {"content: find", start_pending, {live_anew, find_a}, NULL},
    {"content: cancel older", start_pending, {live_anew, cancel_older_a}, only_5_is_cancelled},
    {"content: cancel request", start_pending, {live_anew, cancel_request_a}, only_a_is_cancelled},
    {"take: two takers", start_pending, {take, take}, taken_once},
    {"take: cancelled", start_pending, {take, cancel_5}, taken_once},
    {"readers: mark", start_pending, {mark_and_hold, bit_implies_mark}, NULL},
};

int main(void)
{
    alarm(60);
    static uint64_t random = 2024;
    control = zeroed(ofs_control_size());
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        printf("%s\n", scenarios[i].what);
        fflush(stdout);
        for (uint32_t run = 0; run < RUNS; run++) {
            clear_control(control, SLOTS, 1);
            payload = 0;
            seen_bell = taken = 0;
            found_nothing = other_flag = false;
            model_reset(&random);
            ofs_control_make(control, 77, SLOTS, 1000, 42);
            ofs_blocks_extend(control, 1);
            block = ofs_block_at(control, 0);
            scenarios[i].start();
            model_run(scenarios[i].threads, 2);
            if (scenarios[i].check)
                scenarios[i].check();
        }
    }
    free(control);
    return 0;
}
