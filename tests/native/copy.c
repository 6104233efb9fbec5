/* Copies of all sizes and alignments, with guard bytes on both sides of the target. */
#include "harness.h"

#include <string.h>

#include "ofs_copy.h"

#define GUARD 64u
#define ROOM (OFS_FAR_FROM + 4096u)

static unsigned char *source, *target;

/* One copy, as it is done into private memory, as it is done into shared memory, and there in each way. */
static void one(size_t size, size_t from, size_t to)
{
    unsigned char *at = target + GUARD + to;
    for (int how = 0; how < 4; how++) {
        struct ofs_piece piece = {at, source + from, size};
        memset(at - GUARD, 0xa5, GUARD);
        memset(at + size, 0xa5, GUARD);
        memset(at, 0, size < 8192 ? size : 8192);
        if (how == 0)
            ofs_copy(at, source + from, size);
        else if (how == 1)
            ofs_copy_pieces(&piece, 1, OFS_STREAM_SHARED_FROM);
        else
            ofs_copy_by(how == 2 ? OFS_STREAM : OFS_STRING, &piece, 1, OFS_STREAM_SHARED_FROM);
        CHECK(memcmp(at, source + from, size) == 0);
        for (size_t i = 0; i < GUARD; i++)
            CHECK(at[i - GUARD] == 0xa5 && at[size + i] == 0xa5);
    }
}

static void small_sizes(void)
{
    for (size_t size = 0; size <= 300; size++)
        for (size_t at = 0; at < 64; at += size < 70 ? 1 : 13)
            one(size, at, (at * 7) % 64);
    for (size_t size = 301; size <= 70000; size += 97 + size / 64)
        one(size, size % 64, (size / 64) % 64);
    for (size_t from = 0; from < 64; from++)
        for (size_t to = 0; to < 64; to++)
            one(OFS_STREAM_SHARED_FROM - 32 + 5 * from, from, to); /* ordinary and streaming, all alignments */
}

/* Sizes at which another way of copying begins. */
static void around(size_t limit)
{
    const size_t sizes[] = {limit - 1, limit, limit + 1, limit + 63, limit + 255, limit + 256, limit + 321};
    const size_t shifts[] = {0, 1, 32, 63};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t from = 0; from < 4; from++) {
            memset(target, 0, ROOM);
            one(sizes[i], shifts[from], shifts[(from + i) % 4]);
        }
}

static void pieces(void)
{
    unsigned char *at = target + GUARD;
    struct ofs_piece list[] = {
        {at, source, 100}, {NULL, NULL, 0}, {at + 100, source + 1000, 0}, {at + 128, source + 7, 5000},
    };
    memset(target, 0xa5, 8192);
    ofs_copy_pieces(list, 4, OFS_STREAM_SHARED_FROM);
    CHECK(memcmp(at, source, 100) == 0 && memcmp(at + 128, source + 7, 5000) == 0);
    CHECK(at[-1] == 0xa5 && at[100] == 0xa5 && at[127] == 0xa5 && at[5128] == 0xa5);
    /* Small pieces of a large payload. */
    struct ofs_piece many[] = {{at, source, OFS_FAR_FROM - 6000}, {at + OFS_FAR_FROM - 5952, source + 3, 6001}};
    memset(target, 0xa5, ROOM);
    ofs_copy_pieces(many, 2, OFS_STREAM_SHARED_FROM);
    CHECK(memcmp(at, source, many[0].size) == 0 && memcmp(many[1].target, source + 3, 6001) == 0);
    CHECK(at[-1] == 0xa5 && at[many[0].size] == 0xa5 && at[OFS_FAR_FROM + 49] == 0xa5);
    for (int way = OFS_STREAM; way <= OFS_STRING; way++) {
        memset(target, 0xa5, ROOM);
        ofs_copy_by((enum ofs_way)way, many, 2, OFS_STREAM_SHARED_FROM);
        CHECK(memcmp(at, source, many[0].size) == 0 && memcmp(many[1].target, source + 3, 6001) == 0);
        CHECK(at[-1] == 0xa5 && at[many[0].size] == 0xa5 && at[OFS_FAR_FROM + 49] == 0xa5);
    }
    ofs_copy_pieces(NULL, 0, 1);
    ofs_copy_pieces(NULL, 0, OFS_STREAM_SHARED_FROM);
    ofs_copy(NULL, NULL, 0);
    CHECK(strlen(ofs_copy_kernel()) > 0);
}

/* More copies than there are turns until a try of the other way ends, in each size class: whichever is chosen is right. */
static void chosen(void)
{
    unsigned char *at = target + GUARD;
    for (size_t size = OFS_CHOOSE_FROM; size <= OFS_FAR_FROM; size *= 2)
        for (size_t turn = 0; turn < 100; turn++) {
            struct ofs_piece list[] = {{at, source + turn, size - 2048}, {at + size - 2048, source + turn + 7, 2048}};
            memset(at, 0, 64);
            memset(at + size - 4096, 0, 4096 + GUARD);
            ofs_copy_pieces(list, 2, OFS_STREAM_SHARED_FROM);
            CHECK(memcmp(at, source + turn, 64) == 0 && memcmp(at + size - 2048, source + turn + 7, 2048) == 0);
            CHECK(memcmp(at + size - 4096, source + turn + size - 4096, 2048) == 0 && at[size] == 0);
        }
}

int main(void)
{
    alarm(60);
    uint64_t random = 3;
    source = zeroed(ROOM);
    target = zeroed(ROOM);
    for (size_t i = 0; i < ROOM; i++)
        source[i] = (unsigned char)(next_random(&random) >> 56);
    small_sizes();
    pieces();
    chosen();
    around(OFS_CHOOSE_FROM);
    around(OFS_STREAM_FROM);
    around(OFS_FAR_FROM);
    free(source);
    free(target);
    return 0;
}
