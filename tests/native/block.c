/* Every transition of a block's word: state built by writing the word, one operation, state read back. No threads. */
#include "harness.h"

#include <string.h>

#define ASLEEP 1u
#define RUNG 2u

static struct ofs_control *control;

static struct ofs_block *with(uint32_t index, uint64_t word, uint64_t sequence)
{
    struct ofs_block *block = ofs_block_at(control, index);
    ofs_store64_release(&block->word, word);
    ofs_store64_release(&block->sequence, sequence);
    ofs_store32_release(&control->space, ASLEEP);
    return block;
}

static uint64_t word(uint32_t index)
{
    return ofs_load64_acquire(&ofs_block_at(control, index)->word);
}

static bool rang(void)
{
    uint32_t space = ofs_load32_acquire(&control->space);
    CHECK(space == ASLEEP || space == RUNG);
    return space == RUNG;
}

static struct ofs_content content_of(uint64_t n)
{
    return (struct ofs_content){.key = {.edge = n, .request_high = n + 1, .request_low = n + 2},
                                .offset = n + 3,
                                .frame_size = n + 4,
                                .total_size = n + 5,
                                .stamp = n + 6,
                                .published_ns = n + 7,
                                .segment = (uint32_t)n + 8,
                                .flags = (uint32_t)n + 9};
}

static void publish(void)
{
    const struct {
        uint64_t before, takers, after;
    } rows[] = {
        {word_of(0, 0, 0), 1, word_of(1, 1, 0)},
        {word_of(5, 0, 0), 255, word_of(6, 255, 0)},
        {word_of(0xffffff, 0, 0), 2, word_of(0, 2, 0)}, /* the generation wraps */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct ofs_block *block = with(0, rows[i].before, 8);
        struct ofs_content in = content_of(1000 + i), out;
        memset(&out, 0, sizeof out);
        memset(block->reserved, 0x5a, sizeof block->reserved);
        CHECK(ofs_block_free(block) && !ofs_block_pending(block));
        ofs_block_publish(block, &in, 9, (uint32_t)rows[i].takers);
        CHECK_EQUAL(word(0), rows[i].after);
        CHECK_EQUAL(ofs_block_sequence(block), 9);
        CHECK_EQUAL(ofs_block_takes(block), rows[i].takers);
        CHECK_EQUAL(ofs_block_holders(block), 0);
        CHECK(!ofs_block_free(block) && ofs_block_pending(block));
        ofs_block_read(block, &out);
        CHECK(memcmp(&in, &out, sizeof in) == 0);
        struct ofs_key key;
        ofs_block_key(block, &key);
        CHECK(memcmp(&key, &in.key, sizeof key) == 0);
        CHECK(block->reserved[0] == 0x5a && block->reserved[39] == 0x5a);
    }
}

static void is_free(void)
{
    CHECK(ofs_block_free(with(0, word_of(3, 0, 0), 1)));
    CHECK(!ofs_block_free(with(0, word_of(3, 1, 0), 1)));
    CHECK(!ofs_block_free(with(0, word_of(3, 0, 1), 1)));
    CHECK(!ofs_block_free(with(0, word_of(3, 0, 0x80000000), 1)));
    CHECK(!ofs_block_free(with(0, word_of(3, 0x80, 0), 1)));
    CHECK_EQUAL(ofs_block_holders(with(0, word_of(3, 2, 0x80000001), 1)), 0x80000001);
    CHECK_EQUAL(ofs_block_takes(with(0, word_of(3, 255, 7), 1)), 255);
}

static void hold(void)
{
    const struct {
        uint64_t before;
        uint32_t slot;
        uint64_t after; /* 0: OFS_GONE, unchanged */
    } rows[] = {
        {word_of(4, 1, 0), 0, word_of(4, 1, 1)},
        {word_of(4, 1, 1), 0, word_of(4, 1, 1)},          /* the same process once more */
        {word_of(4, 2, 1), 3, word_of(4, 2, 9)},          /* another beside it */
        {word_of(4, 1, 0), 31, word_of(4, 1, 0x80000000)}, /* the highest bit stays out of `pending` */
        {word_of(0xffffff, 255, 0), 30, word_of(0xffffff, 255, 0x40000000)},
        {word_of(4, 0, 0), 0, 0},                         /* free */
        {word_of(4, 0, 1), 0, 0},                         /* held, but nothing left to take */
        {word_of(4, 0, 0x80000000), 3, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct ofs_content out;
        with(0, rows[i].before, 11);
        int rc = ofs_block_hold(control, 0, 11, rows[i].slot, &out);
        CHECK_EQUAL(rc, rows[i].after ? OFS_OK : OFS_GONE);
        CHECK_EQUAL(word(0), rows[i].after ? rows[i].after : rows[i].before);
        with(0, rows[i].before, 11);
        CHECK_EQUAL(ofs_block_hold(control, 0, 12, rows[i].slot, &out), OFS_GONE); /* another publication */
        CHECK_EQUAL(ofs_block_hold(control, 0, 10, rows[i].slot, &out), OFS_GONE);
        CHECK_EQUAL(word(0), rows[i].before);
        CHECK(!rang());
    }
    struct ofs_content out;
    with(4, word_of(4, 1, 0), 11); /* 4 descriptors are ready: this one is not */
    CHECK_EQUAL(ofs_block_hold(control, 4, 11, 0, &out), OFS_GONE);
    CHECK_EQUAL(ofs_block_hold(control, UINT32_MAX, 11, 0, &out), OFS_GONE);
    CHECK_EQUAL(word(4), word_of(4, 1, 0));
}

static void take(void)
{
    const struct {
        uint64_t before, after; /* 0: OFS_GONE, unchanged */
    } rows[] = {
        {word_of(4, 1, 1), word_of(4, 0, 1)},
        {word_of(4, 255, 0x80000000), word_of(4, 254, 0x80000000)},
        {word_of(4, 0, 1), 0},
        {word_of(4, 0, 0xffffffff), 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        with(0, rows[i].before, 11);
        CHECK_EQUAL(ofs_block_take(control, 0), rows[i].after ? OFS_OK : OFS_GONE);
        CHECK_EQUAL(word(0), rows[i].after ? rows[i].after : rows[i].before);
    }
}

static void release(void)
{
    const struct {
        uint64_t before;
        uint32_t slot;
        uint64_t after;
        bool rings;
    } rows[] = {
        {word_of(4, 0, 1), 0, word_of(4, 0, 0), true},
        {word_of(4, 0, 0x80000000), 31, word_of(4, 0, 0), true},
        {word_of(4, 0, 3), 0, word_of(4, 0, 2), false}, /* another still looks */
        {word_of(4, 1, 1), 0, word_of(4, 1, 0), false}, /* a take is left */
        {word_of(4, 1, 2), 0, word_of(4, 1, 2), false}, /* not ours */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        with(0, rows[i].before, 11);
        ofs_block_release(control, 0, rows[i].slot);
        CHECK_EQUAL(word(0), rows[i].after);
        CHECK_EQUAL(rang(), rows[i].rings);
    }
    with(0, word_of(4, 0, 1), 11);
    ofs_store32_release(&control->space, 0); /* nobody sleeps: no ring, and with it no system call */
    ofs_block_release(control, 0, 0);
    CHECK_EQUAL(ofs_load32_acquire(&control->space), 0);
}

static void cancel(void)
{
    const struct {
        uint64_t before, after; /* 0: OFS_GONE, unchanged */
        bool rings;
    } rows[] = {
        {word_of(4, 1, 0), word_of(4, 0, 0), true},
        {word_of(4, 255, 0), word_of(4, 0, 0), true},
        {word_of(4, 2, 0x80000001), word_of(4, 0, 0x80000001), false}, /* views live on */
        {word_of(4, 0, 0), 0, false},
        {word_of(4, 0, 1), 0, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        with(0, rows[i].before, 11);
        CHECK_EQUAL(ofs_block_cancel(control, 0, 12), OFS_GONE);
        CHECK_EQUAL(word(0), rows[i].before);
        CHECK(!rang());
        CHECK_EQUAL(ofs_block_cancel(control, 0, 11), rows[i].after ? OFS_OK : OFS_GONE);
        CHECK_EQUAL(word(0), rows[i].after ? rows[i].after : rows[i].before);
        CHECK_EQUAL(rang(), rows[i].rings);
    }
}

static void cancel_a_request(void)
{
    struct ofs_content ours = content_of(50), other = content_of(60);
    for (uint32_t i = 0; i < 5; i++)
        with(i, word_of(1, 0, 0), 1);
    ours.key.edge = 1;
    ofs_block_publish(ofs_block_at(control, 0), &ours, 100, 1);
    ours.key.edge = 2; /* on all edges */
    ofs_block_publish(ofs_block_at(control, 1), &ours, 101, 3);
    other.key.request_high = ours.key.request_high; /* half a hash is not enough */
    ofs_block_publish(ofs_block_at(control, 2), &other, 102, 1);
    other.key = ours.key;
    other.key.request_high++;
    ofs_block_publish(ofs_block_at(control, 3), &other, 103, 1);
    ofs_block_publish(ofs_block_at(control, 4), &ours, 104, 1); /* behind the ready ones */
    CHECK_EQUAL(ofs_request_cancel(control, ours.key.request_high, ours.key.request_low), 2);
    CHECK(!ofs_block_pending(ofs_block_at(control, 0)) && !ofs_block_pending(ofs_block_at(control, 1)));
    for (uint32_t i = 2; i < 5; i++)
        CHECK(ofs_block_pending(ofs_block_at(control, i)));
    CHECK_EQUAL(ofs_request_cancel(control, ours.key.request_high, ours.key.request_low), 0);
    CHECK_EQUAL(word(1), word_of(2, 0, 0));
}

static void clear_a_reader(void)
{
    for (uint32_t i = 0; i < 5; i++)
        with(i, word_of(7, i == 1, 0x80000004), 1);
    with(3, word_of(7, 0, 4), 1);
    ofs_reader_clear(control, 2);
    CHECK_EQUAL(word(0), word_of(7, 0, 0x80000000));
    CHECK_EQUAL(word(1), word_of(7, 1, 0x80000000));
    CHECK_EQUAL(word(3), word_of(7, 0, 0));
    CHECK(rang());                                  /* block 3 became free */
    CHECK_EQUAL(word(4), word_of(7, 0, 0x80000004)); /* does not exist yet */
    for (uint32_t i = 0; i < 4; i++)
        with(i, word_of(7, 0, 0x80000000), 1);
    ofs_reader_clear(control, 5);
    CHECK(!rang());
    ofs_reader_clear(control, 31);
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQUAL(word(i), word_of(7, 0, 0));
}

static void mark_readers(void)
{
    CHECK_EQUAL(ofs_readers(control), 0);
    ofs_reader_mark(control, 3, 1234);
    ofs_reader_mark(control, 31, 5678);
    CHECK_EQUAL(ofs_readers(control), 0x80000008);
    CHECK_EQUAL(ofs_load64_acquire(&control->reader[31].pid), 5678);
    CHECK(ofs_load64_acquire(&control->reader[3].since_ns) != 0);
    ofs_reader_unmark(control, 31);
    ofs_reader_unmark(control, 4);
    CHECK_EQUAL(ofs_readers(control), 8);
    ofs_reader_unmark(control, 3);
}

static void a_stale_handle_finds_nothing(void)
{
    struct ofs_block *block = with(0, word_of(0xfffffe, 0, 0), 0);
    struct ofs_content in = content_of(1), out;
    uint64_t sequence = ((uint64_t)1 << 32) - 5; /* R22: past 2^32 nothing is cut off; generations wrap on the way */
    for (int i = 0; i < 10; i++, sequence++) {
        in.key.edge = sequence;
        ofs_block_publish(block, &in, sequence, 1);
        CHECK_EQUAL(ofs_block_hold(control, 0, sequence - 1, 2, &out), OFS_GONE);
        CHECK_EQUAL(ofs_block_hold(control, 0, sequence & 0xffffffff, 2, &out), sequence >> 32 ? OFS_GONE : OFS_OK);
        CHECK_EQUAL(ofs_block_cancel(control, 0, sequence - 1), OFS_GONE);
        CHECK_EQUAL(ofs_block_hold(control, 0, sequence, 2, &out), OFS_OK);
        CHECK_EQUAL(out.key.edge, sequence);
        CHECK_EQUAL(ofs_block_take(control, 0), OFS_OK);
        CHECK_EQUAL(ofs_block_take(control, 0), OFS_GONE);
        CHECK_EQUAL(ofs_block_hold(control, 0, sequence, 3, &out), OFS_GONE);
        ofs_block_release(control, 0, 2);
        CHECK(ofs_block_free(block));
    }
}

static void one_process_takes_twice(void)
{
    struct ofs_block *block = with(0, word_of(1, 0, 0), 0);
    struct ofs_content in = content_of(1), out;
    ofs_block_publish(block, &in, 5, 2);
    CHECK_EQUAL(ofs_block_hold(control, 0, 5, 1, &out), OFS_OK);
    CHECK_EQUAL(ofs_block_take(control, 0), OFS_OK);
    CHECK_EQUAL(ofs_block_hold(control, 0, 5, 1, &out), OFS_OK); /* the same bit: the process counts its own leases */
    CHECK_EQUAL(word(0), word_of(2, 1, 2));
    CHECK_EQUAL(ofs_block_take(control, 0), OFS_OK);
    ofs_block_release(control, 0, 1);
    CHECK(ofs_block_free(block) && rang());
}

static void small_words(void)
{
    CHECK_EQUAL(ofs_segments_retired(control), 0);
    ofs_segment_retired(control);
    ofs_segment_retired(control);
    CHECK_EQUAL(ofs_segments_retired(control), 2);
    CHECK(!ofs_control_closed(control));
    ofs_control_close(control);
    CHECK(ofs_control_closed(control));
    uint64_t died = ofs_control_died(control);
    CHECK(died != 0);
    CHECK_EQUAL(ofs_control_died(control), died); /* the first to find it out decides */
    CHECK_EQUAL(ofs_control_orphan_ttl(control), 1000);
    CHECK_EQUAL(ofs_control_endpoint(control), 77);
    CHECK_EQUAL(ofs_control_key_slots(control), 0);
    CHECK(ofs_control_space(control) == &control->space);
    CHECK_EQUAL(control->pid, 42);
    CHECK(control->created_ns != 0);
}

int main(void)
{
    alarm(60);
    control = fresh_control(0, 4);
    publish();
    is_free();
    hold();
    take();
    release();
    cancel();
    cancel_a_request();
    clear_a_reader();
    mark_readers();
    a_stale_handle_finds_nothing();
    one_process_takes_twice();
    small_words();
    free(control);
    return 0;
}
