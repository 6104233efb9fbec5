/* The directory of a namespace: which producers there are, the order of their payloads, and the arrival bells.
 *
 * Any process of the namespace may call anything here; nothing waits. An entry whose producer died stays until the
 * janitor takes it out.
 */
#ifndef OFS_DIRECTORY_H
#define OFS_DIRECTORY_H

#include "ofs_layout.h"

/* Make a fresh, zeroed directory valid; the last store is the magic word. */
void ofs_directory_make(struct ofs_directory *directory);

/* Was it ever finished, by whatever version? */
bool ofs_directory_made(const struct ofs_directory *directory, uint64_t size);

bool ofs_directory_valid(const struct ofs_directory *directory, uint64_t size);

/* Enter an endpoint; OFS_FULL when all places are taken. */
int ofs_directory_enter(struct ofs_directory *directory, uint64_t endpoint);

/* Take an endpoint out; unknown ones silently. */
void ofs_directory_leave(struct ofs_directory *directory, uint64_t endpoint);

/* Copy the ids of all endpoints to `ids` (OFS_ENDPOINT_LIMIT places); returns how many. */
uint32_t ofs_directory_list(const struct ofs_directory *directory, uint64_t *ids);

/* Changes whenever somebody entered or left. */
uint32_t ofs_directory_epoch(const struct ofs_directory *directory);

/* The next place in the order of all payloads of the namespace; starts at 1. */
uint64_t ofs_directory_stamp(struct ofs_directory *directory);

/* The arrival bell for a hash of the receiving stage. */
ofs_u32 *ofs_directory_bell(struct ofs_directory *directory, uint32_t hash);

#endif
