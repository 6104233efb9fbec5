/* Bad bytes for the Python-free core: a control segment or a directory in which anything may stand, before it is looked
 * at for the first time and while it is used.
 *
 * An input is a little program: how to spoil a segment that a producer made, then what a reader does with it, with more
 * spoiling in between. The memory has nothing before and behind it, so that each step outside is a crash. Built with
 * libFuzzer where there is one (`clang -fsanitize=fuzzer,address,undefined`); otherwise `main` below replays the files it
 * is given and runs inputs from a seeded source.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>

#include "ofs_directory.h"
#include "ofs_keys.h"
#include "ofs_wait.h"

#define PAGE 4096u
#define GUARD ((size_t)1 << 36)
#define ROOM ((size_t)32 << 20)
#define BLOCKS 8u

struct input {
    const uint8_t *at;
    const uint8_t *end;
};

static uint64_t number(struct input *in, unsigned width)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < width; i++)
        value = value << 8 | (in->at < in->end ? *in->at++ : 0);
    return value;
}

static const uint64_t edges[] = {0, 1, 2, 7, 0x7f, 0xff, 0x100, 0xffff, 0x1ffff, 0x20000, 0x20001, 0x7fffffff, 0x80000000,
                                 0xfffffffe, 0xffffffff, 0x100000000, (uint64_t)1 << 40, (uint64_t)1 << 62, INT64_MAX,
                                 (uint64_t)INT64_MAX + 1, UINT64_MAX - 63, UINT64_MAX - 1, UINT64_MAX};

static uint64_t value_of(struct input *in)
{
    uint8_t kind = (uint8_t)number(in, 1);
    return kind < 128 ? edges[kind % (sizeof edges / sizeof edges[0])] : number(in, kind % 8 + 1);
}

/* `size` usable bytes, zero, that end where nothing is any more (as far as pages allow; the rest is poisoned). */
static char *fresh(size_t size)
{
    static char *room;
    if (room == NULL) {
        char *all = mmap(NULL, GUARD + ROOM + GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED || mprotect(all + GUARD, ROOM, PROT_READ | PROT_WRITE) != 0)
            __builtin_trap();
        room = all + GUARD;
    }
    if (madvise(room, ROOM, MADV_DONTNEED) != 0)
        __builtin_trap();
    /* Both ends cannot touch a guard: the end does, for it is what numbers that lie lead to. */
    size_t whole = (size + 63) & ~(size_t)63;
    return room + ROOM - whole;
}

static void store(char *base, size_t size, uint64_t at, unsigned width, uint64_t value)
{
    if (at <= size && width <= size - at)
        memcpy(base + at, &value, width);
}

/* Write into one field, by the compiler's own table: a new field is spoiled by itself. */
static void spoil_field(struct input *in, char *base, size_t size, const char *structure, size_t at)
{
    size_t count;
    const struct ofs_field *fields = ofs_layout_fields(&count);
    size_t wanted = number(in, 1), seen = 0;
    for (size_t i = 0; i < 2 * count; i++) {
        const struct ofs_field *field = &fields[i % count];
        if (strcmp(field->structure, structure) != 0 || seen++ != wanted % 40)
            continue;
        unsigned width = field->size == 4 ? 4 : 8;
        size_t inside = field->size > 8 ? number(in, 2) * 8 % (field->size - 7) : 0;
        store(base, size, at + field->offset + inside, width, value_of(in));
        return;
    }
}

static void spoil_control(struct input *in, char *base, size_t size)
{
    switch (number(in, 1) % 8) {
    case 0:
    case 1:
    case 2:
        spoil_field(in, base, size, "ofs_control", 0);
        break;
    case 3:
    case 4:
    case 5:
        spoil_field(in, base, size, "ofs_block", ofs_block_offset((uint32_t)number(in, 1) % BLOCKS));
        break;
    case 6: /* any word, the key table above all */
        store(base, size, sizeof(struct ofs_control) + number(in, 2) * 8, 8, value_of(in));
        break;
    default:
        store(base, size, number(in, 3), 8, value_of(in));
    }
}

static struct ofs_key key_of(struct input *in)
{
    uint64_t kind = number(in, 1) % 4;
    return (struct ofs_key){.edge = 7, .request_high = 1, .request_low = kind < 3 ? kind : value_of(in)};
}

/* What a producer leaves: some payloads, under keys where there is a table for them. */
static void publish(struct ofs_control *control, uint32_t slots)
{
    ofs_blocks_extend(control, OFS_BLOCK_CHUNK);
    for (uint32_t i = 0; i < BLOCKS - 2; i++) {
        struct ofs_content content = {.key = {7, 1, i % 3}, .offset = 64 * i, .frame_size = 60, .total_size = 60, .stamp = i};
        ofs_block_publish(ofs_block_at(control, i), &content, 100 + i, 1 + i % 2);
        if (slots)
            ofs_keys_insert(control, &content.key, i);
    }
}

struct hold {
    uint32_t block;
    uint32_t slot;
};

static void read_side(struct input *in, struct ofs_control *control, size_t size)
{
    struct hold held[4];
    uint32_t holds = 0;
    struct ofs_content content;
    struct ofs_found found;
    struct ofs_key key;
    uint32_t block, slot;
    for (int steps = 0; in->at < in->end && steps < 64; steps++) {
        switch (number(in, 1) % 16) {
        case 0:
        case 1:
        case 2:
        case 3:
            spoil_control(in, (char *)control, size);
            break;
        case 4:
            block = (uint32_t)number(in, 1) % 16 ? (uint32_t)number(in, 1) % BLOCKS : (uint32_t)value_of(in);
            slot = (uint32_t)number(in, 1) % OFS_READER_SLOTS;
            if (ofs_block_hold(control, block, block < BLOCKS ? 100 + block : value_of(in), slot, &content) == OFS_OK && holds < 4)
                held[holds++] = (struct hold){block, slot};
            break;
        case 5:
            if (holds)
                ofs_block_take(control, held[holds - 1].block);
            break;
        case 6:
            if (holds) {
                holds--;
                ofs_block_release(control, held[holds].block, held[holds].slot);
            }
            break;
        case 7:
            block = (uint32_t)value_of(in);
            if (block < ofs_blocks_ready(control))
                ofs_block_cancel(control, block, value_of(in));
            break;
        case 8:
            ofs_request_cancel(control, 1, number(in, 1) % 3);
            break;
        case 9:
            key = key_of(in);
            if (ofs_keys_find(control, &key, &found) == OFS_OK && found.index >= OFS_BLOCK_LIMIT)
                __builtin_trap();
            break;
        case 10:
            key = key_of(in);
            ofs_keys_cancel_older(control, &key, value_of(in));
            break;
        case 11:
            ofs_reader_mark(control, (uint32_t)number(in, 1) % OFS_READER_SLOTS, 1);
            break;
        case 12:
            slot = (uint32_t)number(in, 1) % OFS_READER_SLOTS;
            ofs_reader_clear(control, slot);
            ofs_reader_unmark(control, slot);
            break;
        case 13:
            for (uint32_t i = 0; i < ofs_blocks_ready(control); i++)
                if (!ofs_block_free(ofs_block_at(control, i)))
                    ofs_block_read(ofs_block_at(control, i), &content);
            break;
        case 14:
            ofs_control_died(control);
            ofs_control_orphan_ttl(control);
            ofs_control_endpoint(control);
            ofs_control_closed(control);
            ofs_segments_retired(control);
            ofs_readers(control);
            break;
        default:
            ofs_bell_ring_if_heard(ofs_control_space(control));
            ofs_bell_wait(ofs_control_space(control), (uint32_t)value_of(in), 0, 1, 1);
        }
    }
}

static void control(struct input *in)
{
    static const uint32_t tables[] = {0, 1, 16, OFS_KEY_LIMIT};
    uint32_t slots = tables[number(in, 1) % 4];
    size_t size = ofs_control_size();
    struct ofs_control *made = (struct ofs_control *)fresh(size);
    ofs_control_make(made, value_of(in), slots, value_of(in), 1);
    publish(made, slots);
    for (uint64_t left = number(in, 1) % 6; left > 0; left--)
        spoil_control(in, (char *)made, size);
    size_t raw = number(in, 1) % 8 ? 0 : number(in, 1); /* whole headers, as they come */
    for (size_t i = 0; i < raw && in->at < in->end; i++)
        store((char *)made, size, i, 1, number(in, 1));
    size_t said = number(in, 1) % 8 ? size : value_of(in) % (size + 1);
    if (ofs_control_valid(made, said) && said == size)
        read_side(in, made, size);
}

static void directory(struct input *in)
{
    size_t size = sizeof(struct ofs_directory);
    struct ofs_directory *made = (struct ofs_directory *)fresh(size);
    static uint64_t ids[OFS_ENDPOINT_LIMIT];
    ofs_directory_make(made);
    ofs_directory_enter(made, 5);
    for (uint64_t left = number(in, 1) % 6; left > 0; left--)
        spoil_field(in, (char *)made, size, "ofs_directory", 0);
    size_t said = number(in, 1) % 8 ? size : value_of(in) % (size + 1);
    ofs_directory_made(made, said);
    if (!ofs_directory_valid(made, said))
        return;
    for (int steps = 0; in->at < in->end && steps < 64; steps++) {
        switch (number(in, 1) % 8) {
        case 0:
        case 1:
            spoil_field(in, (char *)made, size, "ofs_directory", 0);
            break;
        case 2:
            ofs_directory_enter(made, value_of(in));
            break;
        case 3:
            ofs_directory_leave(made, value_of(in));
            break;
        case 4:
            if (ofs_directory_list(made, ids) > OFS_ENDPOINT_LIMIT)
                __builtin_trap();
            break;
        case 5:
            ofs_directory_stamp(made);
            ofs_directory_epoch(made);
            break;
        case 6:
            ofs_bell_ring(ofs_directory_bell(made, (uint32_t)value_of(in)));
            break;
        default:
            ofs_bell_wait(ofs_directory_bell(made, (uint32_t)value_of(in)), (uint32_t)value_of(in), 0, 1, 1);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    struct input in = {bytes, bytes + count};
    if (number(&in, 1) % 4 == 0)
        directory(&in);
    else
        control(&in);
    return 0;
}

#ifndef WITH_LIBFUZZER
/* xorshift64*: the same inputs in every run of a seed. */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

static uint8_t data[512];
static size_t size;
static const char *last; /* where a crash leaves its input, to be replayed */

static void on_death(void)
{
    FILE *file = fopen(last, "wb");
    if (file != NULL) {
        fwrite(data, 1, size, file);
        fclose(file);
    }
}

static void load(const char *path)
{
    FILE *file = fopen(path, "rb");
    size = file ? fread(data, 1, sizeof data, file) : 0;
    if (file != NULL)
        fclose(file);
}

/* usage: control SEED ROUNDS SECONDS FILE-FOR-A-CRASH [FILE…] */
int main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    uint64_t state = strtoull(argv[1], NULL, 10) * 2 + 1;
    uint64_t rounds = strtoull(argv[2], NULL, 10);
    uint64_t kept = (uint64_t)argc - 5, round;
    uint64_t stop = ofs_now_ns() + strtoull(argv[3], NULL, 10) * 1000000000u;
    last = argv[4];
    __sanitizer_set_death_callback(on_death);
    for (uint64_t i = 0; i < kept; i++) {
        load(argv[5 + i]);
        LLVMFuzzerTestOneInput(data, size);
    }
    for (round = 0; round < rounds && ofs_now_ns() < stop; round++) {
        if (kept && round % 2) { /* a kept one with some bytes changed */
            load(argv[5 + (next_random(&state) >> 32) % kept]);
            for (uint64_t left = next_random(&state) >> 61; size && left > 0; left--)
                data[(next_random(&state) >> 32) % size] = (uint8_t)(next_random(&state) >> 40);
        } else {
            size = next_random(&state) >> 32 & 255;
            for (size_t i = 0; i < size; i++)
                data[i] = (uint8_t)(next_random(&state) >> 40);
        }
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%llu inputs\n", (unsigned long long)(round + kept));
    return 0;
}
#endif
