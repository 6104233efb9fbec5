/* The key table against an oracle, under crowding, deletion, equal hashes and corruption. */
#include "harness.h"

#include <string.h>

#define SLOTS 64u
#define BLOCKS 32u
#define KEYS 14u

static struct ofs_control *control;
static uint64_t random_state = 7;

/* What the oracle knows of a block. */
static struct {
    bool used;
    uint32_t key;
    uint64_t stamp, sequence;
    bool pending;
} oracle[BLOCKS];

static struct ofs_key keys[KEYS];

static ofs_u64 *table(void)
{
    return ofs_control_keys(control);
}

/* Keys that crowd: three neighbouring places, one at the end of the table (probing wraps), few tags, equal hashes. */
static void make_keys(void)
{
    for (uint32_t i = 0; i < KEYS; i++) {
        uint64_t place = i % 4 == 3 ? SLOTS - 1 : i % 4;
        keys[i] = (struct ofs_key){.edge = 0, .request_high = 0, .request_low = (uint64_t)(i / 4) << 32 | place};
    }
    keys[10] = (struct ofs_key){.edge = 0, .request_high = 1, .request_low = keys[2].request_low ^ 2};
    keys[11] = keys[2];
    keys[11].request_high = (uint64_t)1 << 63; /* shifted out of the hash: differs from keys[2] in nothing else */
    uint64_t inverse = 1; /* of the hash's multiplier, by Newton's method: an edge of any hash we like */
    for (int i = 0; i < 6; i++)
        inverse *= 2 - 0x9e3779b97f4a7c15u * inverse;
    keys[12] = (struct ofs_key){.edge = inverse * 3}; /* place 3, tag 0, and only the edge differs from keys[0] */
    keys[13] = (struct ofs_key){.edge = 0x0fffffffffffffff, .request_high = 5, .request_low = 1};
}

static void insert(uint32_t index, uint64_t *sequence, uint64_t *stamp)
{
    struct ofs_block *block = ofs_block_at(control, index);
    uint32_t key = below(&random_state, KEYS);
    /* Stamps come from all producers, and two puts of this one may overtake each other: not in order. */
    uint64_t at = *stamp += 2;
    at = below(&random_state, 4) == 0 && at > 9 ? at - 7 : at;
    struct ofs_content content = {.key = keys[key], .stamp = at};
    ofs_block_publish(block, &content, ++*sequence, 1);
    ofs_keys_insert(control, &keys[key], index);
    oracle[index].used = oracle[index].pending = true;
    oracle[index].key = key;
    oracle[index].stamp = at;
    oracle[index].sequence = *sequence;
}

static void find(uint32_t key)
{
    struct ofs_found found;
    const uint32_t nobody = BLOCKS;
    uint32_t newest = nobody, count = 0;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (!oracle[i].used || !oracle[i].pending || oracle[i].key != key)
            continue;
        count++;
        if (newest == nobody || oracle[i].stamp > oracle[newest].stamp)
            newest = i;
    }
    int rc = ofs_keys_find(control, &keys[key], &found);
    CHECK_EQUAL(rc, newest == nobody ? OFS_ABSENT : OFS_OK);
    if (rc != OFS_OK)
        return;
    CHECK_EQUAL(found.stamp, oracle[newest].stamp);
    CHECK(found.index < BLOCKS && oracle[found.index].key == key);
    CHECK_EQUAL(found.sequence, oracle[found.index].sequence);
    CHECK_EQUAL(found.older, count - 1);
}

static void drop_older(uint32_t key, uint64_t stamp)
{
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        if (oracle[i].used && oracle[i].pending && oracle[i].key == key && oracle[i].stamp < stamp) {
            oracle[i].pending = false;
            wanted++;
        }
    CHECK_EQUAL(ofs_keys_cancel_older(control, &keys[key], stamp), wanted);
}

/* One entry per block in use; nothing deleted before an empty place, or chains would grow for ever. */
static void check_table(void)
{
    uint32_t entries = 0, used = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t one = ofs_load64_relaxed(&table()[i]), next = ofs_load64_relaxed(&table()[(i + 1) % SLOTS]);
        entries += one > 1;
        CHECK(!(one == 1 && next == 0));
    }
    for (uint32_t i = 0; i < BLOCKS; i++)
        used += oracle[i].used;
    CHECK_EQUAL(entries, used);
}

static void remove_block(uint32_t i)
{
    ofs_keys_remove(control, &keys[oracle[i].key], i);
    ofs_keys_remove(control, &keys[oracle[i].key], i); /* once more: must do nothing */
    oracle[i].used = false;
}

static void random_operations(uint32_t steps)
{
    uint64_t sequence = 0, stamp = 0;
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t i = below(&random_state, BLOCKS);
        switch (below(&random_state, 8)) {
        case 0:
        case 1:
        case 2:
            if (!oracle[i].used)
                insert(i, &sequence, &stamp);
            break;
        case 3:
        case 4:
            if (oracle[i].used && oracle[i].pending)
                CHECK_EQUAL(ofs_block_cancel(control, i, oracle[i].sequence), OFS_OK);
            oracle[i].pending = false;
            if (oracle[i].used)
                remove_block(i);
            break;
        case 5:
            if (step % 4 == 0)
                drop_older(below(&random_state, KEYS), stamp - below(&random_state, 40));
            break;
        case 6:
            if (oracle[i].used && oracle[i].pending) { /* taken: the entry stays for now, but leads nowhere */
                CHECK_EQUAL(ofs_block_take(control, i), OFS_OK);
                oracle[i].pending = false;
            }
            break;
        default:
            find(below(&random_state, KEYS));
        }
        if (step % 16 == 0)
            check_table();
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (oracle[i].used && oracle[i].pending)
            CHECK_EQUAL(ofs_block_cancel(control, i, oracle[i].sequence), OFS_OK);
        if (oracle[i].used)
            remove_block(i);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK_EQUAL(ofs_load64_relaxed(&table()[i]), 0); /* all short again */
}

static void full_table(void)
{
    struct ofs_found found;
    struct ofs_content content = {.key = keys[0], .stamp = 1};
    ofs_block_publish(ofs_block_at(control, 0), &content, 1000000, 1);
    for (uint32_t i = 0; i < SLOTS; i++)
        ofs_keys_insert(control, &keys[4], 0); /* another tag */
    ofs_keys_insert(control, &keys[0], 0); /* no place: must end */
    CHECK_EQUAL(ofs_keys_find(control, &keys[0], &found), OFS_ABSENT);
    ofs_keys_remove(control, &keys[0], 0);
    for (uint32_t i = 0; i < SLOTS; i++)
        ofs_store64_release(&table()[i], 1); /* all deleted */
    CHECK_EQUAL(ofs_keys_find(control, &keys[0], &found), OFS_ABSENT);
    CHECK_EQUAL(ofs_keys_cancel_older(control, &keys[0], UINT64_MAX), 0);
    ofs_keys_remove(control, &keys[0], 0);
    ofs_keys_insert(control, &keys[0], 0); /* a deleted place is used again */
    CHECK_EQUAL(ofs_keys_find(control, &keys[0], &found), OFS_OK);
    for (uint32_t i = 0; i < SLOTS; i++)
        ofs_store64_release(&table()[i], 0);
    CHECK_EQUAL(ofs_block_cancel(control, 0, 1000000), OFS_OK);
}

/* Whatever stands in the table: every look-up ends and answers only what a block itself confirms. */
static void corrupted_table(uint32_t rounds)
{
    struct ofs_content content = {.key = keys[2], .stamp = 5};
    ofs_block_publish(ofs_block_at(control, 4), &content, 2000000, 255);
    for (uint32_t round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            uint64_t tag = below(&random_state, 2) ? keys[below(&random_state, KEYS)].request_low & ~(uint64_t)0xffffffff
                                                   : next_random(&random_state) << 32;
            uint64_t low = below(&random_state, 2) ? below(&random_state, BLOCKS + 40) : next_random(&random_state) >> 32;
            ofs_store64_release(&table()[i], tag | low);
        }
        for (uint32_t k = 0; k < KEYS; k++) {
            struct ofs_found found;
            int rc = ofs_keys_find(control, &keys[k], &found);
            CHECK(rc == OFS_ABSENT || (k == 2 && found.index == 4 && found.sequence == 2000000 && found.stamp == 5));
            CHECK(ofs_keys_cancel_older(control, &keys[k], 5) == 0);
            ofs_keys_remove(control, &keys[k], next_random(&random_state) & 1 ? 4 : 0xfffffffe);
        }
    }
    CHECK_EQUAL(ofs_block_takes(ofs_block_at(control, 4)), 255);
}

static void no_table(void)
{
    struct ofs_control *bare = fresh_control(0, 4);
    struct ofs_found found;
    CHECK_EQUAL(ofs_keys_find(bare, &keys[0], &found), OFS_ABSENT);
    CHECK_EQUAL(ofs_keys_cancel_older(bare, &keys[0], 5), 0);
    free(bare);
}

int main(void)
{
    alarm(60);
    control = fresh_control(SLOTS, BLOCKS);
    make_keys();
    random_operations(1000000);
    full_table();
    corrupted_table(2000);
    no_table();
    free(control);
    return 0;
}
