/* The space allocator against an oracle that marks every 64-byte cell. */
#include "harness.h"

#include <errno.h>
#include <string.h>

#include "ofs_ring.h"

#define CELLS 64 /* of the arena of 4096 bytes */
#define ARENAS 3

struct piece {
    uint64_t offset, size;
    uint32_t arena;
};

struct oracle {
    bool used[ARENAS][CELLS];
    struct piece live[ARENAS * CELLS];
    uint32_t count;
    uint64_t bytes;
};

static void mark(struct oracle *oracle, const struct piece *piece, bool used)
{
    uint64_t first = piece->offset / 64, cells = ofs_ring_round(piece->size) / 64;
    CHECK_EQUAL(piece->offset % OFS_ALIGN, 0);
    CHECK(piece->arena < ARENAS && first + cells <= CELLS); /* inside the arena */
    for (uint64_t i = first; i < first + cells; i++) {
        CHECK(oracle->used[piece->arena][i] != used); /* two live pieces overlap, or a free one is freed */
        oracle->used[piece->arena][i] = used;
    }
    oracle->bytes = used ? oracle->bytes + cells * 64 : oracle->bytes - cells * 64;
}

static uint64_t longest_gap(const struct oracle *oracle, uint32_t arenas)
{
    uint64_t longest = 0;
    for (uint32_t a = 0; a < arenas; a++) {
        uint64_t run = 0;
        for (uint32_t i = 0; i < CELLS; i++) {
            run = oracle->used[a][i] ? 0 : run + 64;
            longest = run > longest ? run : longest;
        }
    }
    return longest;
}

static void give(struct ofs_ring *ring, struct oracle *oracle, uint32_t at)
{
    struct piece piece = oracle->live[at];
    oracle->live[at] = oracle->live[--oracle->count];
    mark(oracle, &piece, false);
    CHECK_EQUAL(ofs_ring_give(ring, piece.arena, piece.offset, piece.size), OFS_OK);
    CHECK_EQUAL((uint64_t)ofs_ring_give(ring, piece.arena, piece.offset, piece.size), (uint64_t)-EINVAL); /* twice */
}

/* field fault R22: random allocation and out-of-order freeing in a ring of 4096 bytes. */
static void random_steps(uint32_t arenas, uint32_t steps)
{
    struct ofs_ring ring = {0};
    static struct oracle oracle;
    uint64_t random = 22 + arenas;
    memset(&oracle, 0, sizeof oracle);
    for (uint32_t a = 0; a < arenas; a++) {
        uint32_t number;
        CHECK_EQUAL(ofs_ring_add(&ring, 4096, &number), OFS_OK);
        CHECK_EQUAL(number, a);
    }
    for (uint32_t step = 0; step < steps; step++) {
        if (below(&random, 100) < 55) {
            struct piece piece = {.size = 1 + below(&random, 1500)};
            uint64_t longest = longest_gap(&oracle, arenas);
            int rc = ofs_ring_take(&ring, piece.size, &piece.arena, &piece.offset);
            CHECK_EQUAL(rc == OFS_OK, ofs_ring_round(piece.size) <= longest);
            if (rc == OFS_OK) {
                mark(&oracle, &piece, true);
                oracle.live[oracle.count++] = piece;
            }
        } else if (oracle.count) {
            give(&ring, &oracle, below(&random, oracle.count));
        }
        CHECK_EQUAL(ring.used, oracle.bytes);
        CHECK(ring.used <= ring.size);
        CHECK_EQUAL(ofs_ring_longest(&ring), longest_gap(&oracle, arenas));
    }
    while (oracle.count)
        give(&ring, &oracle, below(&random, oracle.count));
    CHECK_EQUAL(ring.used, 0);
    for (uint32_t a = 0; a < arenas; a++) {
        struct piece whole = {.size = 4096};
        CHECK_EQUAL(ofs_ring_take(&ring, whole.size, &whole.arena, &whole.offset), OFS_OK);
        mark(&oracle, &whole, true);
    }
    uint32_t arena;
    uint64_t offset;
    CHECK_EQUAL(ofs_ring_take(&ring, 1, &arena, &offset), OFS_FULL);
    ofs_ring_destroy(&ring);
}

static void lowest_address_first(void)
{
    struct ofs_ring ring = {0};
    uint32_t arena;
    uint64_t offset, at[4];
    CHECK_EQUAL(ofs_ring_add(&ring, 256, &arena), OFS_OK);
    CHECK_EQUAL(ofs_ring_add(&ring, 256, &arena), OFS_OK);
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(ofs_ring_take(&ring, 64, &arena, &at[i]), OFS_OK);
        CHECK_EQUAL(arena, 0);
        CHECK_EQUAL(at[i], 64 * (uint64_t)i);
    }
    CHECK_EQUAL(ofs_ring_take(&ring, 64, &arena, &offset), OFS_OK);
    CHECK_EQUAL(arena, 1); /* the first is full */
    CHECK_EQUAL(ofs_ring_give(&ring, 0, 128, 64), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 64, &arena, &offset), OFS_OK);
    CHECK(arena == 0 && offset == 128); /* what was just given back, not the colder memory behind */
    ofs_ring_destroy(&ring);
}

static void only_what_was_taken_is_taken_back(void)
{
    struct ofs_ring ring = {0};
    uint32_t arena;
    uint64_t a, b, c;
    CHECK_EQUAL(ofs_ring_add(&ring, 4096, &arena), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 256, &arena, &a), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 256, &arena, &b), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 256, &arena, &c), OFS_OK);
    const struct {
        uint32_t arena;
        uint64_t offset, size;
    } wrong[] = {
        {1, 0, 64}, {7, 0, 64}, {0, 4096, 64}, {0, 4032, 128}, {0, UINT64_MAX - 63, 64}, {0, 0, 4096}, {0, 512, 512},
        {0, 768, 64}, {0, 0, UINT64_MAX - 127},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, wrong[i].arena, wrong[i].offset, wrong[i].size), (uint64_t)-EINVAL);
    CHECK_EQUAL(ring.used, 768);
    CHECK_EQUAL(ofs_ring_give(&ring, 0, b, 256), OFS_OK);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, b - 64, 128), (uint64_t)-EINVAL); /* runs into a gap */
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, b + 192, 128), (uint64_t)-EINVAL); /* starts in one */
    CHECK_EQUAL(ofs_ring_give(&ring, 0, a, 256), OFS_OK);
    CHECK_EQUAL(ofs_ring_give(&ring, 0, c, 256), OFS_OK);
    CHECK_EQUAL(ofs_ring_longest(&ring), 4096);
    ofs_ring_destroy(&ring);
}

/* Without a gap anywhere, only the bounds tell a wrong piece. */
static void a_full_arena_has_bounds(void)
{
    struct ofs_ring ring = {0};
    uint32_t arena;
    uint64_t offset;
    CHECK_EQUAL(ofs_ring_add(&ring, 4096, &arena), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 4096, &arena, &offset), OFS_OK);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, 4032, 128), (uint64_t)-EINVAL);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, 4160, 64), (uint64_t)-EINVAL);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, UINT64_MAX - 63, 64), (uint64_t)-EINVAL);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, 0, 8192), (uint64_t)-EINVAL);
    CHECK_EQUAL(ofs_ring_give(&ring, 0, 0, 4096), OFS_OK);
    CHECK_EQUAL(ofs_ring_longest(&ring), 4096);
    ofs_ring_destroy(&ring);
}

static void arenas_come_and_go(void)
{
    struct ofs_ring ring = {0};
    uint32_t arena, other;
    uint64_t offset;
    CHECK_EQUAL(ofs_ring_take(&ring, 1, &arena, &offset), OFS_FULL);
    CHECK_EQUAL(ofs_ring_add(&ring, 4096, &arena), OFS_OK);
    CHECK_EQUAL(ofs_ring_add(&ring, 8192, &other), OFS_OK);
    CHECK_EQUAL(ring.size, 12288);
    CHECK_EQUAL(ofs_ring_take(&ring, 8192, &arena, &offset), OFS_OK);
    CHECK_EQUAL(arena, 1);
    CHECK_EQUAL((uint64_t)ofs_ring_remove(&ring, 1), (uint64_t)-EBUSY);
    CHECK_EQUAL(ofs_ring_remove(&ring, 0), OFS_OK);
    CHECK_EQUAL((uint64_t)ofs_ring_remove(&ring, 0), (uint64_t)-EINVAL);
    CHECK_EQUAL((uint64_t)ofs_ring_remove(&ring, 9), (uint64_t)-EINVAL);
    CHECK_EQUAL((uint64_t)ofs_ring_give(&ring, 0, 0, 64), (uint64_t)-EINVAL);
    CHECK_EQUAL(ring.size, 8192);
    CHECK_EQUAL(ofs_ring_take(&ring, 64, &arena, &offset), OFS_FULL); /* the removed one is not used */
    CHECK_EQUAL(ofs_ring_add(&ring, 64, &other), OFS_OK);
    CHECK_EQUAL(other, 0); /* its place is */
    CHECK_EQUAL(ofs_ring_add(&ring, 64, &other), OFS_OK);
    CHECK_EQUAL(other, 2);
    CHECK_EQUAL(ofs_ring_longest(&ring), 64);
    ofs_ring_destroy(&ring);
    CHECK_EQUAL(ring.arena_count, 0);
}

static void sizes_round_up(void)
{
    const uint64_t pairs[][2] = {{0, 64}, {1, 64}, {63, 64}, {64, 64}, {65, 128}, {4096, 4096}, {4097, 4160},
                                 {(uint64_t)5 << 32, (uint64_t)5 << 32}, {((uint64_t)5 << 32) + 1, ((uint64_t)5 << 32) + 64}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        CHECK_EQUAL(ofs_ring_round(pairs[i][0]), pairs[i][1]);
    struct ofs_ring ring = {0};
    uint32_t arena;
    uint64_t offset;
    CHECK_EQUAL(ofs_ring_add(&ring, (uint64_t)6 << 32, &arena), OFS_OK); /* numbers only: no memory is touched */
    CHECK_EQUAL(ofs_ring_take(&ring, (uint64_t)5 << 32, &arena, &offset), OFS_OK);
    CHECK_EQUAL(ofs_ring_take(&ring, 64, &arena, &offset), OFS_OK);
    CHECK_EQUAL(offset, (uint64_t)5 << 32);
    CHECK_EQUAL(ofs_ring_take(&ring, UINT64_MAX - 127, &arena, &offset), OFS_FULL);
    ofs_ring_destroy(&ring);
}

int main(void)
{
    alarm(60);
    sizes_round_up();
    lowest_address_first();
    only_what_was_taken_is_taken_back();
    a_full_arena_has_bounds();
    arenas_come_and_go();
    random_steps(1, 100000);
    random_steps(ARENAS, 100000);
    return 0;
}
