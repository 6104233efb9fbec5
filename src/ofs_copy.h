/* Copying payload bytes into shared memory at the speed of the memory bus.
 *
 * Nothing here blocks or allocates; any thread may call it, with no lock held. Source and target must not overlap.
 */
#ifndef OFS_COPY_H
#define OFS_COPY_H

#include <stddef.h>

/* From this size on streaming stores win: the target will not be read from this core's cache soon, and fetching
 * each line before overwriting it would cost a third of the bandwidth. Below, the reader finds it in cache. */
#define OFS_STREAM_FROM ((size_t)4 << 20)

/* One piece: `size` bytes from `source` to `target`. */
struct ofs_piece {
    void *target;
    const void *source;
    size_t size;
};

/* Copy one piece; all stores are globally visible before a later release store of the same thread. */
void ofs_copy(void *target, const void *source, size_t size);

/* Copy `count` pieces in order. */
void ofs_copy_pieces(const struct ofs_piece *pieces, size_t count);

/* Which kernel large copies use on this machine: "avx512", "avx2", "sse2" or "memcpy". For reports. */
const char *ofs_copy_kernel(void);

#endif
