/* A producer and several consumers on one mapping, with cancellations, look-ups by key and dying readers beside them.
 *
 * Payload bytes are plain memory, so that ThreadSanitizer reports any reader whose hold does not keep the producer out.
 * Each consumer checks the bytes twice while it holds; at the end every publication must have been delivered exactly as
 * often as it had takers, or less by what was cancelled.
 */
#include "harness.h"

#include <pthread.h>

#include "ofs_wait.h"

#define BLOCKS 8u
#define SLOTS 32u /* of the key table */
#define WORDS 64u /* of a payload */
#define CONSUMERS 3u
#define FIRST 100u /* sequence of the first publication */
#define PLAIN_ROUNDS 20000u
#define PATIENCE ((uint64_t)15000000000u)

static struct ofs_control *control;
static uint64_t bytes[BLOCKS][WORDS];
static ofs_u32 delivered[PLAIN_ROUNDS], cancelled[PLAIN_ROUNDS];
static uint32_t takers[PLAIN_ROUNDS];
static uint32_t rounds;
static ofs_u32 arrival, stop;

static struct ofs_key key_of(uint64_t sequence)
{
    return (struct ofs_key){.edge = sequence % 5, .request_high = 0, .request_low = sequence % 5 << 32 | 7};
}

static uint64_t checksum(const uint64_t *payload)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < WORDS; i++)
        sum = sum * 31 + payload[i];
    return sum;
}

/* A block that is free again, its old entry removed; waits for one like a put that finds no room. */
static uint32_t free_block(uint64_t *owner, uint32_t *from)
{
    for (;;) {
        uint32_t seen = ofs_bell_announce(&control->space);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uint32_t at = (*from + i) % BLOCKS;
            if (!ofs_block_free(ofs_block_at(control, at)))
                continue;
            if (owner[at]) {
                struct ofs_key key = key_of(owner[at]);
                ofs_keys_remove(control, &key, at);
            }
            *from = at + 1;
            return at;
        }
        CHECK_EQUAL(ofs_bell_wait(&control->space, seen, 0, PATIENCE, ofs_now_ns() + PATIENCE), OFS_OK);
    }
}

static void *produce(void *argument)
{
    uint64_t random = 11, owner[BLOCKS] = {0};
    uint32_t from = 0;
    (void)argument;
    for (uint32_t round = 0; round < rounds; round++) {
        uint64_t sequence = FIRST + round;
        uint32_t at = free_block(owner, &from);
        owner[at] = sequence;
        for (uint32_t i = 0; i < WORDS; i++)
            bytes[at][i] = sequence * 1000 + i;
        struct ofs_content content = {.key = key_of(sequence), .offset = at, .frame_size = sequence,
                                      .total_size = checksum(bytes[at]), .stamp = sequence};
        uint32_t count = 1 + below(&random, 3);
        takers[round] = count;
        ofs_block_publish(ofs_block_at(control, at), &content, sequence, count);
        ofs_keys_insert(control, &content.key, at);
        ofs_bell_ring(&arrival);
    }
    return NULL;
}

static void check_bytes(uint32_t at, uint64_t sequence, const struct ofs_content *content)
{
    CHECK_EQUAL(content->offset, at);
    CHECK_EQUAL(content->frame_size, sequence);
    CHECK_EQUAL(content->stamp, sequence);
    CHECK_EQUAL(content->key.edge, sequence % 5);
    CHECK_EQUAL(checksum(bytes[at]), content->total_size);
    CHECK_EQUAL(bytes[at][0], sequence * 1000);
}

static void visit(uint32_t at, uint64_t sequence, uint32_t slot, uint64_t *random)
{
    struct ofs_content content;
    if (sequence < FIRST || ofs_block_hold(control, at, sequence, slot, &content) != OFS_OK)
        return;
    check_bytes(at, sequence, &content);
    bool dies = below(random, 8) == 0; /* while decoding: that payload is not used up */
    if (!dies && ofs_block_take(control, at) == OFS_OK)
        ofs_add32_release(&delivered[sequence - FIRST], 1);
    check_bytes(at, sequence, &content);
    CHECK(ofs_block_holders(ofs_block_at(control, at)) >> slot & 1);
    if (dies)
        ofs_reader_clear(control, slot); /* what a survivor that has the slot's lock does */
    else
        ofs_block_release(control, at, slot);
}

static void *consume(void *argument)
{
    const uint32_t *me = argument;
    uint64_t random = 1000 + *me;
    while (!ofs_load32_acquire(&stop)) {
        uint32_t seen = ofs_bell_read(&arrival);
        bool any = false;
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uint32_t at = (i + *me) % BLOCKS;
            struct ofs_block *block = ofs_block_at(control, at);
            uint64_t sequence = ofs_block_sequence(block);
            if (ofs_block_pending(block)) {
                any = true;
                visit(at, sequence, *me * 15 + 1, &random); /* slots 1, 16, 31 */
            }
        }
        if (!any)
            ofs_bell_wait(&arrival, seen, 0, 2000000, UINT64_MAX);
    }
    return NULL;
}

/* Looks up by key, and now and then cancels what it finds, or something stale. */
static void *meddle(void *argument)
{
    uint64_t random = 5;
    (void)argument;
    while (!ofs_load32_acquire(&stop)) {
        struct ofs_key key = key_of(below(&random, 5));
        struct ofs_found found;
        if (ofs_keys_find(control, &key, &found) != OFS_OK)
            continue;
        CHECK(found.index < BLOCKS && found.sequence >= FIRST);
        CHECK_EQUAL(found.stamp, found.sequence);
        CHECK_EQUAL(found.sequence % 5, key.edge);
        if (below(&random, 50) == 0)
            ofs_block_cancel(control, found.index, found.sequence - BLOCKS); /* long gone */
        if (below(&random, 200) == 0) {
            /* Counted before: whoever finds a take missing must find this. */
            ofs_add32_release(&cancelled[found.sequence - FIRST], 1);
            ofs_block_cancel(control, found.index, found.sequence);
        }
        if (below(&random, 5) == 0)
            visit(found.index, found.sequence, 7, &random);
    }
    return NULL;
}

int main(void)
{
    alarm(80);
    rounds = scaled(PLAIN_ROUNDS);
    control = fresh_control(SLOTS, BLOCKS);
    pthread_t producer, consumers[CONSUMERS], meddler;
    uint32_t numbers[CONSUMERS];
    CHECK(pthread_create(&meddler, NULL, meddle, NULL) == 0);
    for (uint32_t i = 0; i < CONSUMERS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&consumers[i], NULL, consume, &numbers[i]) == 0);
    }
    CHECK(pthread_create(&producer, NULL, produce, NULL) == 0);
    CHECK(pthread_join(producer, NULL) == 0);
    uint64_t deadline = ofs_now_ns() + PATIENCE;
    for (uint32_t i = 0; i < BLOCKS; i++)
        while (!ofs_block_free(ofs_block_at(control, i)))
            CHECK(ofs_now_ns() < deadline);
    ofs_store32_release(&stop, 1);
    for (uint32_t i = 0; i < CONSUMERS; i++)
        CHECK(pthread_join(consumers[i], NULL) == 0);
    CHECK(pthread_join(meddler, NULL) == 0);
    uint32_t whole = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t got = ofs_load32_acquire(&delivered[i]);
        CHECK(got <= takers[i]);
        if (!ofs_load32_acquire(&cancelled[i]))
            CHECK_EQUAL(got, takers[i]);
        whole += got == takers[i];
    }
    CHECK(whole > rounds / 2);
    free(control);
    return 0;
}
