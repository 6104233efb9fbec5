/* Copying payload bytes into shared memory at the speed of the memory bus.
 *
 * Nothing here blocks or allocates; any thread may call it, with no lock held. Source and target must not overlap.
 */
#ifndef OFS_COPY_H
#define OFS_COPY_H

#include <stddef.h>

/* Streaming stores go past the cache: no line is fetched before it is overwritten. Into private memory they win from the
 * size on that would not stay in the cache anyway. Into memory that a process on another core has just read they win far
 * earlier, for its cache holds the lines and an ordinary store has to take back each of them (bench/results/kernels/copy.json). */
#define OFS_STREAM_FROM ((size_t)4 << 20)
#define OFS_STREAM_SHARED_FROM ((size_t)4 << 10)
/* From that many bytes in one call on, source and target do not stay in the cache until the next payload: they are copied
 * in the way that waits least for memory, smaller ones in the way that waits least for the cache (decision 11). */
#define OFS_FAR_FROM ((size_t)8 << 20)

/* One piece: `size` bytes from `source` to `target`. */
struct ofs_piece {
    void *target;
    const void *source;
    size_t size;
};

/* Copy into memory of this process. */
void ofs_copy(void *target, const void *source, size_t size);

/* Copy `count` pieces in order, those of at least `stream_from` bytes (64 or more) by streaming stores. All are globally visible before
 * a later release store of the same thread. */
void ofs_copy_pieces(const struct ofs_piece *pieces, size_t count, size_t stream_from);

/* Which kernel large copies use on this machine: "avx512", "avx2", "sse2" or "memcpy". For reports. */
const char *ofs_copy_kernel(void);

#endif
