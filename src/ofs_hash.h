/* BLAKE2b (RFC 7693) without a key: what shared memory knows request ids, edges and stages by.
 *
 * Needs no memory but the caller's; any thread may call it. Nothing here blocks.
 */
#ifndef OFS_HASH_H
#define OFS_HASH_H

#include <stddef.h>
#include <stdint.h>

#define OFS_HASH_LIMIT ((size_t)64) /* the longest digest, in bytes */

/* The digest of `size` bytes at `data`, 1 to OFS_HASH_LIMIT bytes long, which are part of what it depends on. */
void ofs_hash(const void *data, size_t size, void *digest, size_t digest_size);

#endif
