#include "ofs_hash.h"

#include <string.h>

#define BLOCK ((size_t)128)

static const uint64_t INITIAL[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Which word of the message each step of a round takes. */
static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t rotate(uint64_t value, int right)
{
    return value >> right | value << (64 - right);
}

static inline void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 63);
}

static inline uint64_t little(uint64_t value)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(value);
#else
    return value;
#endif
}

/* Take in a block of which `upto` bytes, counted from the start of the message, are the last ones so far. */
static void compress(uint64_t state[8], const uint8_t block[BLOCK], uint64_t upto, int last)
{
    uint64_t v[16], m[16];
    memcpy(m, block, sizeof m);
    for (int i = 0; i < 16; i++)
        m[i] = little(m[i]);
    memcpy(v, state, 8 * sizeof v[0]);
    memcpy(v + 8, INITIAL, sizeof INITIAL);
    v[12] ^= upto;
    if (last)
        v[14] = ~v[14];
#pragma GCC unroll 12 /* then the order is no table any more, and the state stays in registers */
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = ORDER[round % 10];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        state[i] ^= v[i] ^ v[i + 8];
}

void ofs_hash(const void *data, size_t size, void *digest, size_t digest_size)
{
    const uint8_t *at = data;
    uint64_t state[8], upto = 0;
    uint8_t rest[BLOCK] = {0};
    memcpy(state, INITIAL, sizeof state);
    state[0] ^= 0x01010000 ^ (uint64_t)digest_size;
    for (; size > BLOCK; at += BLOCK, size -= BLOCK) { /* the last block, full or not, is another matter */
        upto += BLOCK;
        compress(state, at, upto, 0);
    }
    if (size > 0)
        memcpy(rest, at, size);
    compress(state, rest, upto + size, 1);
    for (int i = 0; i < 8; i++)
        state[i] = little(state[i]);
    memcpy(digest, state, digest_size);
}
