/* Each pair of a release and an acquire, alone: one thread writes plain memory and then gives the signal, the other
 * sees the signal and reads that memory. Right values are no proof on a strongly ordered machine; under ThreadSanitizer
 * a pair that orders nothing is a reported race, whatever the hardware does.
 */
#include "harness.h"

#include <pthread.h>
#include <string.h>

#include "ofs_directory.h"
#include "ofs_wait.h"

#define SEQUENCE 9u

static struct ofs_control *control;
static struct ofs_directory *directory;
static struct ofs_block *block;
static struct ofs_content content;
static struct ofs_key key = {.edge = 3, .request_high = 4, .request_low = 5};
static uint64_t ids[OFS_ENDPOINT_LIMIT];
static uint64_t plain; /* what the signal publishes */

static void publish(void)
{
    struct ofs_content in = {.key = key, .offset = 1, .frame_size = 1, .total_size = 1, .stamp = 1,
                             .published_ns = 1, .segment = 1, .flags = 1};
    ofs_block_publish(block, &in, SEQUENCE, 1);
}

static void setup(void)
{
    ofs_control_make(control, 77, 64, 1000, 42);
    ofs_blocks_extend(control, 1);
    block = ofs_block_at(control, 0);
}

/* The block as a reader with slot 2 has it, nothing left to take. */
static void setup_held(void)
{
    setup();
    ofs_store64_release(&block->word, word_of(1, 0, 4));
}

static void setup_pending(void)
{
    setup();
    publish();
}

static void nothing(void)
{
}

static void make_control(void)
{
    ofs_control_make(control, 77, 64, 1000, 42);
}
static bool control_made(void)
{
    return ofs_control_valid(control, ofs_control_size());
}
static void make_directory(void)
{
    ofs_directory_make(directory);
}
static bool directory_valid(void)
{
    return ofs_directory_valid(directory, sizeof *directory);
}
static bool directory_made(void)
{
    return ofs_directory_made(directory, sizeof *directory);
}
static void setup_zero_blocks(void)
{
    setup();
    ofs_blocks_extend(control, 0);
}
static void extend(void)
{
    ofs_blocks_extend(control, 1);
}
static bool is_ready(void)
{
    return ofs_blocks_ready(control) == 1;
}
static bool held(void)
{
    return ofs_block_hold(control, 0, SEQUENCE, 2, &content) == OFS_OK;
}
static bool is_pending(void)
{
    return ofs_block_pending(block);
}
static bool has_takes(void)
{
    return ofs_block_takes(block) == 1;
}
static bool has_sequence(void)
{
    return ofs_block_sequence(block) == SEQUENCE;
}
static bool is_free(void)
{
    return ofs_block_free(block);
}
static void release(void)
{
    ofs_block_release(control, 0, 2);
}
static void clear_reader(void)
{
    ofs_reader_clear(control, 2);
}
static void cancel(void)
{
    CHECK_EQUAL(ofs_block_cancel(control, 0, SEQUENCE), OFS_OK);
}
static void ring(void)
{
    ofs_bell_ring(&control->space);
}
static bool rung(void)
{
    return ofs_bell_read(&control->space) == 2;
}
static bool wait_spinning(void)
{
    return ofs_bell_wait(&control->space, 0, 20000000000u, 20000000000u, UINT64_MAX) == OFS_OK;
}
static void announce(void)
{
    ofs_bell_announce(&control->space);
}
static bool announced(void)
{
    return ofs_bell_read(&control->space) == 1;
}
static void insert(void)
{
    ofs_keys_insert(control, &key, 0);
}
static bool found_by_key(void)
{
    struct ofs_found found;
    return ofs_keys_find(control, &key, &found) == OFS_OK;
}
static bool cancelled_by_key(void)
{
    return ofs_keys_cancel_older(control, &key, 2) == 1;
}
static void enter(void)
{
    CHECK_EQUAL(ofs_directory_enter(directory, 5), OFS_OK);
}
static bool listed(void)
{
    return ofs_directory_list(directory, ids) == 1;
}
static void leave(void)
{
    ofs_directory_leave(directory, 5);
}
static bool not_listed(void)
{
    return ofs_directory_list(directory, ids) == 0;
}
static bool epoch_changed(void)
{
    return ofs_directory_epoch(directory) == 1;
}
static bool epoch_changed_twice(void)
{
    return ofs_directory_epoch(directory) == 2;
}
static void retire(void)
{
    ofs_segment_retired(control);
}
static bool retired(void)
{
    return ofs_segments_retired(control) == 1;
}
static void close_control(void)
{
    ofs_control_close(control);
}
static bool closed(void)
{
    return ofs_control_closed(control);
}
static void mark(void)
{
    ofs_reader_mark(control, 4, 7);
}
static bool marked(void)
{
    return ofs_readers(control) == 16;
}
static void setup_marked(void)
{
    setup();
    mark();
}
static void unmark(void)
{
    ofs_reader_unmark(control, 4);
}
static bool unmarked(void)
{
    return ofs_readers(control) == 0;
}

/* One field of the content alone: `give` stores it the way publish does, `seen` reads it the way read does. */
#define FIELD(field, expression)                                 \
    static bool publishes_##field(void)                          \
    {                                                            \
        return expression != 0;                                  \
    }                                                            \
    static void stores_##field(void)                             \
    {                                                            \
        if (sizeof block->field == 8)                            \
            ofs_store64_release((ofs_u64 *)&block->field, 1);    \
        else                                                     \
            ofs_store32_release((ofs_u32 *)&block->field, 1);    \
    }                                                            \
    static bool reads_##field(void)                              \
    {                                                            \
        ofs_block_read(block, &content);                         \
        return content_##field() != 0;                           \
    }
#define CONTENT(field, member)              \
    static uint64_t content_##field(void)   \
    {                                       \
        return content.member;              \
    }
CONTENT(edge, key.edge)
CONTENT(request_high, key.request_high)
CONTENT(request_low, key.request_low)
CONTENT(offset, offset)
CONTENT(frame_size, frame_size)
CONTENT(total_size, total_size)
CONTENT(stamp, stamp)
CONTENT(published_ns, published_ns)
CONTENT(segment, segment)
CONTENT(flags, flags)
FIELD(edge, ofs_load64_acquire(&block->edge))
FIELD(request_high, ofs_load64_acquire(&block->request_high))
FIELD(request_low, ofs_load64_acquire(&block->request_low))
FIELD(offset, ofs_load64_acquire(&block->offset))
FIELD(frame_size, ofs_load64_acquire(&block->frame_size))
FIELD(total_size, ofs_load64_acquire(&block->total_size))
FIELD(stamp, ofs_load64_acquire(&block->stamp))
FIELD(published_ns, ofs_load64_acquire(&block->published_ns))
FIELD(segment, ofs_load32_acquire(&block->segment))
FIELD(flags, ofs_load32_acquire(&block->flags))

#define KEY_READS(field)                 \
    static bool key_reads_##field(void)  \
    {                                    \
        struct ofs_key seen;             \
        ofs_block_key(block, &seen);     \
        return seen.field != 0;          \
    }
KEY_READS(edge)
KEY_READS(request_high)
KEY_READS(request_low)

#define BOTH(field) {"content: publish " #field, setup, publish, publishes_##field}, \
                    {"content: read " #field, setup, stores_##field, reads_##field}

static const struct {
    const char *what;
    void (*setup)(void);
    void (*give)(void);
    bool (*seen)(void);
} probes[] = {
    {"made: control", nothing, make_control, control_made},
    {"made: directory", nothing, make_directory, directory_valid},
    {"made: directory of any version", nothing, make_directory, directory_made},
    {"ready", setup_zero_blocks, extend, is_ready},
    {"published: hold", setup, publish, held},
    {"published: pending", setup, publish, is_pending},
    {"published: takes", setup, publish, has_takes},
    {"content: sequence", setup, publish, has_sequence},
    BOTH(edge),
    BOTH(request_high),
    BOTH(request_low),
    BOTH(offset),
    BOTH(frame_size),
    BOTH(total_size),
    BOTH(stamp),
    BOTH(published_ns),
    BOTH(segment),
    BOTH(flags),
    {"content: key edge", setup, stores_edge, key_reads_edge},
    {"content: key request_high", setup, stores_request_high, key_reads_request_high},
    {"content: key request_low", setup, stores_request_low, key_reads_request_low},
    {"released: release", setup_held, release, is_free},
    {"released: dead reader", setup_held, clear_reader, is_free},
    {"released: cancel", setup_pending, cancel, is_free},
    {"arrival: read", setup, ring, rung},
    {"arrival: wait", setup, ring, wait_spinning},
    {"arrival: announce", setup, announce, announced},
    {"published: find", setup_pending, insert, found_by_key},
    {"published: cancel older", setup_pending, insert, cancelled_by_key},
    {"entered: list", make_directory, enter, listed},
    {"entered: epoch", make_directory, enter, epoch_changed},
    {"entered: leave", NULL, leave, not_listed},
    {"entered: leave, epoch", NULL, leave, epoch_changed_twice},
    {"retired", setup, retire, retired},
    {"closed", setup, close_control, closed},
    {"readers: mark", setup, mark, marked},
    {"readers: unmark", setup_marked, unmark, unmarked},
};

static void *writer(void *argument)
{
    const size_t *i = argument;
    plain = 1000 + *i;
    probes[*i].give();
    return NULL;
}

static void *reader(void *argument)
{
    const size_t *i = argument;
    while (!probes[*i].seen())
        ofs_cpu_relax();
    if (plain != 1000 + *i) {
        fprintf(stderr, "%s: the signal came before what it publishes\n", probes[*i].what);
        exit(1);
    }
    return NULL;
}

int main(void)
{
    alarm(60);
    control = zeroed(ofs_control_size());
    directory = zeroed(sizeof *directory);
    for (size_t i = 0; i < sizeof probes / sizeof probes[0]; i++) {
        pthread_t first, second;
        clear_control(control, 64, 1);
        memset((void *)directory, 0, sizeof *directory);
        plain = 0;
        if (probes[i].setup) {
            probes[i].setup();
        } else {
            make_directory();
            enter();
        }
        /* Named before it runs: what a sanitizer reports next belongs to it. */
        printf("%s\n", probes[i].what);
        fflush(stdout);
        CHECK(pthread_create(&second, NULL, reader, &i) == 0);
        CHECK(pthread_create(&first, NULL, writer, &i) == 0);
        CHECK(pthread_join(first, NULL) == 0);
        CHECK(pthread_join(second, NULL) == 0);
    }
    free(control);
    free(directory);
    return 0;
}
