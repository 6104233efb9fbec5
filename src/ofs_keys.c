#include "ofs_keys.h"

#define EMPTY 0u
#define DELETED 1u
#define INDEX_BIAS 2u

static uint64_t hash_of(const struct ofs_key *key)
{
    /* The parts are hashes already; the multiplier spreads edges that differ in few bits. */
    return key->request_low ^ (key->request_high << 1) ^ key->edge * 0x9e3779b97f4a7c15u;
}

static uint64_t entry_of(uint64_t hash, uint32_t index)
{
    return (hash & 0xffffffff00000000u) | (index + INDEX_BIAS);
}

void ofs_block_key(const struct ofs_block *block, struct ofs_key *key)
{
    key->edge = ofs_load64_acquire(&block->edge);
    key->request_high = ofs_load64_acquire(&block->request_high);
    key->request_low = ofs_load64_acquire(&block->request_low);
}

void ofs_keys_insert(struct ofs_control *control, const struct ofs_key *key, uint32_t index)
{
    ofs_u64 *table = ofs_control_keys(control);
    uint32_t slots = ofs_control_key_slots(control), mask = slots - 1;
    uint64_t hash = hash_of(key);
    for (uint32_t i = 0; i < slots; i++) {
        ofs_u64 *place = &table[(hash + i) & mask];
        if (ofs_load64_relaxed(place) <= DELETED) {
            ofs_store64_release(place, entry_of(hash, index));
            return;
        }
    }
}

void ofs_keys_remove(struct ofs_control *control, const struct ofs_key *key, uint32_t index)
{
    ofs_u64 *table = ofs_control_keys(control);
    uint32_t slots = ofs_control_key_slots(control), mask = slots - 1;
    uint64_t hash = hash_of(key), entry = entry_of(hash, index);
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t at = (uint32_t)(hash + i) & mask;
        uint64_t seen = ofs_load64_relaxed(&table[at]);
        if (seen == EMPTY)
            return;
        if (seen != entry)
            continue;
        ofs_store64_release(&table[at], DELETED);
        /* Deleted places before an empty one lead nowhere: emptying them keeps every look-up short for ever. */
        while (ofs_load64_relaxed(&table[(at + 1) & mask]) == EMPTY && ofs_load64_relaxed(&table[at]) == DELETED) {
            ofs_store64_release(&table[at], EMPTY);
            at = (at - 1) & mask;
        }
        return;
    }
}

/* Is block `index` the live carrier of `key`? Fills `found` if so. */
static bool carries(struct ofs_control *control, uint32_t index, const struct ofs_key *key, struct ofs_found *found)
{
    if (index >= ofs_blocks_ready(control))
        return false;
    struct ofs_block *block = ofs_block_at(control, index);
    struct ofs_key seen;
    uint64_t sequence = ofs_load64_acquire(&block->sequence);
    if (!ofs_block_pending(block))
        return false;
    ofs_block_key(block, &seen);
    found->stamp = ofs_load64_acquire(&block->stamp);
    found->sequence = sequence;
    found->index = index;
    /* content: fields of the next life would come with the next sequence. */
    return seen.edge == key->edge && seen.request_high == key->request_high && seen.request_low == key->request_low &&
           ofs_load64_acquire(&block->sequence) == sequence;
}

int ofs_keys_find(struct ofs_control *control, const struct ofs_key *key, struct ofs_found *found)
{
    ofs_u64 *table = ofs_control_keys(control);
    uint32_t slots = ofs_control_key_slots(control), mask = slots - 1;
    uint64_t hash = hash_of(key);
    int rc = OFS_ABSENT;
    for (uint32_t i = 0; i < slots; i++) {
        uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);
        struct ofs_found one;
        if (seen == EMPTY)
            break;
        if (seen == DELETED || (seen ^ hash) >> 32 != 0 || !carries(control, (uint32_t)seen - INDEX_BIAS, key, &one))
            continue;
        one.older = rc == OFS_OK ? found->older + 1 : 0;
        if (rc == OFS_ABSENT || one.stamp > found->stamp)
            *found = one;
        found->older = one.older;
        rc = OFS_OK;
    }
    return rc;
}

uint32_t ofs_keys_cancel_older(struct ofs_control *control, const struct ofs_key *key, uint64_t stamp)
{
    ofs_u64 *table = ofs_control_keys(control);
    uint32_t slots = ofs_control_key_slots(control), mask = slots - 1, cancelled = 0;
    uint64_t hash = hash_of(key);
    for (uint32_t i = 0; i < slots; i++) {
        uint64_t seen = ofs_load64_acquire(&table[(hash + i) & mask]);
        struct ofs_found one;
        if (seen == EMPTY)
            break;
        if (seen != DELETED && (seen ^ hash) >> 32 == 0 &&
            carries(control, (uint32_t)seen - INDEX_BIAS, key, &one) && one.stamp < stamp)
            cancelled += ofs_block_cancel(control, one.index, one.sequence) == OFS_OK;
    }
    return cancelled;
}
