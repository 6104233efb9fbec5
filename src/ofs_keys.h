/* Names: the key table of a producer, so that a consumer finds a block by (edge, request id) alone.
 *
 * An open-addressed table of single words: upper half a tag from the hash, lower half the block's index + 2; 0 is empty,
 * 1 is a deleted entry. Only the producer writes; anyone may read at any time. An entry may point to a block that lives
 * a new life meanwhile: the block's own fields and sequence decide. Look-up and insertion are wait-free.
 */
#ifndef OFS_KEYS_H
#define OFS_KEYS_H

#include "ofs_block.h"

/* A block found by key. */
struct ofs_found {
    uint64_t sequence;
    uint64_t stamp;
    uint32_t index;
    uint32_t older; /* others under the key that are not cancelled yet: a put is about to, or died before it did */
};

/* Producer: the table has twice as many places as there can be blocks, so there always is one. */
void ofs_keys_insert(struct ofs_control *control, const struct ofs_key *key, uint32_t index);

/* Producer: before the block is used for something else. */
void ofs_keys_remove(struct ofs_control *control, const struct ofs_key *key, uint32_t index);

/* The newest block under this key that has a take left; OFS_ABSENT when there is none. */
int ofs_keys_find(struct ofs_control *control, const struct ofs_key *key, struct ofs_found *found);

/* Drop the takes left of all blocks under this key older than `stamp`. Returns how many blocks. */
uint32_t ofs_keys_cancel_older(struct ofs_control *control, const struct ofs_key *key, uint64_t stamp);

/* What the published block's key is; for removing its entry. */
void ofs_block_key(const struct ofs_block *block, struct ofs_key *key);

#endif
