/* Copying payload bytes into shared memory at the speed of the memory bus.
 *
 * Nothing here blocks or allocates; any thread may call it, with no lock held. Source and target must not overlap.
 */
#ifndef OFS_COPY_H
#define OFS_COPY_H

#include <stddef.h>

/* Two ways to copy what is large. Streaming stores go past the cache: no line is fetched before it is overwritten, and none
 * stays. The CPU's own copy ("rep movsb"), where it has one made for that, fetches none either, but leaves the bytes where
 * the reader finds them sooner. Which one takes less time depends on the CPU, and on which core the reader runs (decision 12).
 * Ordinary stores are as good as the better one or up to five times as slow: a process on another core has just read that
 * memory, and each line is to be taken back from its cache (bench/results/kernels/copy.json). */
enum ofs_way { OFS_STREAM, OFS_STRING };

/* From that size on a piece is large: in memory of this process, where streaming wins only for what would not stay in the
 * cache anyway, and in memory that others read. */
#define OFS_STREAM_FROM ((size_t)4 << 20)
#define OFS_STREAM_SHARED_FROM ((size_t)4 << 10)
/* From that many bytes in one call on, into memory that others read, the way is chosen by what each took before. There is one
 * choice for each doubling of the size, the last one for all that is larger; and as many where pieces are small on average. */
#define OFS_CHOOSE_FROM ((size_t)32 << 10)
#define OFS_SIZE_CLASSES 12u
#define OFS_SMALL_PIECES ((size_t)64 << 10)
#define OFS_TRIED_AGAIN_AFTER ((size_t)4 << 30)
/* From that many bytes in one call on, source and target do not stay in the cache until the next payload: they are streamed
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

/* Copy `count` pieces in order, those of at least `large` bytes (64 or more) in one of the two ways; which one is chosen where
 * `large` is OFS_STREAM_SHARED_FROM. All are globally visible before a later release store of the same thread. */
void ofs_copy_pieces(const struct ofs_piece *pieces, size_t count, size_t large);

/* The same, in this way. `OFS_STRING` copies rightly on any CPU. For tests and measurements. */
void ofs_copy_by(enum ofs_way way, const struct ofs_piece *pieces, size_t count, size_t large);

/* Which kernel streams on this machine: "avx512", "avx2", "sse2" or "memcpy". For reports. */
const char *ofs_copy_kernel(void);

#endif
