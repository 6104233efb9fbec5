#include "ofs_copy.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "ofs_choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* Each streaming kernel copies `size` bytes, a multiple of 256, to a 64-byte aligned target, past the cache. */

/* What a kernel asks for ahead of its loads: source lines, `lines` bytes on; and, unless `pages` is 0, the translations
 * of the pages `pages` bytes on, of source and target. Constants in each use, so that each use is a loop of its own.
 * Asking touches nothing, so it may reach behind the end. */
struct ahead {
    size_t lines;
    size_t pages;
};

/* For a source that is in the cache, as after it was produced: what costs is the way from there. */
#define NEAR ((struct ahead){.lines = 2048, .pages = 0})
/* For one that is not: the core's own prefetcher knows the pattern better than requests far ahead, which confuse it; but
 * it stops at the end of each page, and there the copy waits for the page walks of both sides. */
#define FAR ((struct ahead){.lines = 512, .pages = 8192})
#define SMALLEST_PAGE ((size_t)4096)

#define INLINE __attribute__((always_inline)) static inline

INLINE void ask_for_pages(char *to, const char *from, size_t i, struct ahead ahead)
{
    if (ahead.pages && (i & (SMALLEST_PAGE - 1)) == 0) {
        _mm_prefetch(from + i + ahead.pages, _MM_HINT_NTA);
        _mm_prefetch(to + i + ahead.pages, _MM_HINT_NTA);
    }
}

__attribute__((target("avx512f"))) INLINE void loop_avx512(char *to, const char *from, size_t size, struct ahead ahead)
{
    for (size_t i = 0; i < size; i += 256) {
        ask_for_pages(to, from, i, ahead);
        _mm_prefetch(from + i + ahead.lines, _MM_HINT_NTA);
        _mm_prefetch(from + i + ahead.lines + 64, _MM_HINT_NTA);
        _mm_prefetch(from + i + ahead.lines + 128, _MM_HINT_NTA);
        _mm_prefetch(from + i + ahead.lines + 192, _MM_HINT_NTA);
        __m512i a = _mm512_loadu_si512((const void *)(from + i));
        __m512i b = _mm512_loadu_si512((const void *)(from + i + 64));
        __m512i c = _mm512_loadu_si512((const void *)(from + i + 128));
        __m512i d = _mm512_loadu_si512((const void *)(from + i + 192));
        _mm512_stream_si512((void *)(to + i), a);
        _mm512_stream_si512((void *)(to + i + 64), b);
        _mm512_stream_si512((void *)(to + i + 128), c);
        _mm512_stream_si512((void *)(to + i + 192), d);
    }
}

__attribute__((target("avx2"))) INLINE void loop_avx2(char *to, const char *from, size_t size, struct ahead ahead)
{
    for (size_t i = 0; i < size; i += 128) {
        ask_for_pages(to, from, i, ahead);
        _mm_prefetch(from + i + ahead.lines, _MM_HINT_NTA);
        _mm_prefetch(from + i + ahead.lines + 64, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const void *)(from + i));
        __m256i b = _mm256_loadu_si256((const void *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const void *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const void *)(from + i + 96));
        _mm256_stream_si256((void *)(to + i), a);
        _mm256_stream_si256((void *)(to + i + 32), b);
        _mm256_stream_si256((void *)(to + i + 64), c);
        _mm256_stream_si256((void *)(to + i + 96), d);
    }
}

INLINE void loop_sse2(char *to, const char *from, size_t size, struct ahead ahead)
{
    for (size_t i = 0; i < size; i += 64) {
        ask_for_pages(to, from, i, ahead);
        _mm_prefetch(from + i + ahead.lines, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const void *)(from + i));
        __m128i b = _mm_loadu_si128((const void *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const void *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const void *)(from + i + 48));
        _mm_stream_si128((void *)(to + i), a);
        _mm_stream_si128((void *)(to + i + 16), b);
        _mm_stream_si128((void *)(to + i + 32), c);
        _mm_stream_si128((void *)(to + i + 48), d);
    }
}

__attribute__((target("avx512f"))) static void stream_avx512(char *to, const char *from, size_t size, bool far)
{
    if (far)
        loop_avx512(to, from, size, FAR);
    else
        loop_avx512(to, from, size, NEAR);
}

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t size, bool far)
{
    if (far)
        loop_avx2(to, from, size, FAR);
    else
        loop_avx2(to, from, size, NEAR);
}

static void stream_sse2(char *to, const char *from, size_t size, bool far)
{
    if (far)
        loop_sse2(to, from, size, FAR);
    else
        loop_sse2(to, from, size, NEAR);
}

/* Makes a later release store publish streamed bytes: these stores are weakly ordered even on x86, as those of one `rep movsb`
 * are among themselves, and without it a reader can see the block's word before the block's bytes. */
static void finish_streaming(void)
{
    _mm_sfence();
}

static void stream(char *to, const char *from, size_t size, bool far)
{
    size_t head = (size_t)(-(intptr_t)to & 63);
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    size_t body = size & ~(size_t)255;
    if (__builtin_cpu_supports("avx512f"))
        stream_avx512(to, from, body, far);
    else if (__builtin_cpu_supports("avx2"))
        stream_avx2(to, from, body, far);
    else
        stream_sse2(to, from, body, far);
    memcpy(to + body, from + body, size - body);
}

/* The CPU's own copy. There is no intrinsic for it. */
static void string(void *to, const void *from, size_t size)
{
    __asm__ __volatile__("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}

/* Does the CPU say that its own copy is made for large sizes? Asked once: in a virtual machine the answer takes its time. */
static bool has_string(void)
{
    enum { UNKNOWN, NO, YES };
    const unsigned erms = 1u << 9; /* in EBX of leaf 7; <cpuid.h> has no name for it */
    static ofs_u64 known;
    uint64_t answer = ofs_load64_relaxed(&known);
    if (answer == UNKNOWN) {
        unsigned a, b = 0, c, d;
        answer = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & erms) ? YES : NO;
        ofs_store64_release(&known, answer);
    }
    return answer == YES;
}

const char *ofs_copy_kernel(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return "avx512";
    return __builtin_cpu_supports("avx2") ? "avx2" : "sse2";
}

#else

static void finish_streaming(void)
{
}

static void stream(char *to, const char *from, size_t size, bool far)
{
    (void)far;
    memcpy(to, from, size);
}

static void string(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

static bool has_string(void)
{
    return false;
}

const char *ofs_copy_kernel(void)
{
    return "memcpy";
}

#endif

static size_t whole_of(const struct ofs_piece *pieces, size_t count)
{
    size_t whole = 0;
    for (size_t i = 0; i < count; i++)
        whole += pieces[i].size;
    return whole;
}

static void copy(const struct ofs_piece *pieces, size_t count, size_t large, enum ofs_way way, bool far)
{
    for (size_t i = 0; i < count; i++) {
        const struct ofs_piece *piece = &pieces[i];
        if (piece->size == 0)
            continue; /* an empty tensor's address may be null, which memcpy must not be given */
        if (piece->size < large)
            memcpy(piece->target, piece->source, piece->size);
        else if (way == OFS_STRING)
            string(piece->target, piece->source, piece->size);
        else
            stream(piece->target, piece->source, piece->size, far);
    }
    finish_streaming();
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* One choice for sizes up to twice as large: what fits the caches differs from what does not. And one for many small pieces:
 * the CPU's own copy takes a while to begin, longer where a process on a core without a common cache has read the target. */
static struct ofs_choice choices[2][OFS_SIZE_CLASSES];

static struct ofs_choice *choice_for(size_t whole, size_t count)
{
    unsigned class = 0;
    while (class < OFS_SIZE_CLASSES - 1 && whole >= 2 * OFS_CHOOSE_FROM << class)
        class++;
    return &choices[whole / count < OFS_SMALL_PIECES][class];
}

/* Calls of this size from a try of the other way to the next. After so many bytes a change has been found, and what a try
 * costs has been made good: the smaller the copies, the more one way can lose. */
static uint64_t most_calls(size_t whole)
{
    size_t calls = OFS_TRIED_AGAIN_AFTER / whole;
    return calls < 64 ? 64 : calls < 2048 ? calls : 2048;
}

static void copy_chosen(const struct ofs_piece *pieces, size_t count, size_t large, size_t whole)
{
    struct ofs_choice *choice = choice_for(whole, count);
    struct ofs_turn turn = ofs_choice_next(choice, most_calls(whole));
    uint64_t begun = turn.judged ? now_ns() : 0;
    copy(pieces, count, large, turn.way, whole >= OFS_FAR_FROM);
    if (turn.judged)
        ofs_choice_cost(choice, turn.way, (now_ns() - begun) * 1024 / (whole / 1024));
}

void ofs_copy_pieces(const struct ofs_piece *pieces, size_t count, size_t large)
{
    size_t whole = whole_of(pieces, count);
    if (large == OFS_STREAM_SHARED_FROM && whole >= OFS_CHOOSE_FROM && has_string())
        copy_chosen(pieces, count, large, whole);
    else
        copy(pieces, count, large, OFS_STREAM, whole >= OFS_FAR_FROM);
}

void ofs_copy_by(enum ofs_way way, const struct ofs_piece *pieces, size_t count, size_t large)
{
    copy(pieces, count, large, way, whole_of(pieces, count) >= OFS_FAR_FROM);
}

void ofs_copy(void *target, const void *source, size_t size)
{
    ofs_copy_pieces(&(struct ofs_piece){target, source, size}, 1, OFS_STREAM_FROM);
}
