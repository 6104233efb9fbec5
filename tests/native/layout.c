/* The table of fields against the structures themselves, and what makes a segment valid. */
#include "harness.h"

#include <string.h>

#include "ofs_directory.h"

static size_t size_of(const char *structure)
{
    if (strcmp(structure, "ofs_block") == 0)
        return sizeof(struct ofs_block);
    if (strcmp(structure, "ofs_reader") == 0)
        return sizeof(struct ofs_reader);
    if (strcmp(structure, "ofs_control") == 0)
        return sizeof(struct ofs_control);
    if (strcmp(structure, "ofs_bell") == 0)
        return sizeof(struct ofs_bell);
    if (strcmp(structure, "ofs_directory") == 0)
        return sizeof(struct ofs_directory);
    fprintf(stderr, "a structure nobody knows: %s\n", structure);
    exit(1);
}

static void rows_tile_each_structure(void)
{
    size_t count, structures = 0;
    const struct ofs_field *fields = ofs_layout_fields(&count);
    for (size_t i = 0; i < count; i++) {
        bool first = i == 0 || strcmp(fields[i].structure, fields[i - 1].structure) != 0;
        bool last = i + 1 == count || strcmp(fields[i].structure, fields[i + 1].structure) != 0;
        CHECK_EQUAL(fields[i].offset, first ? 0 : fields[i - 1].offset + fields[i - 1].size);
        if (last)
            CHECK_EQUAL(fields[i].offset + fields[i].size, size_of(fields[i].structure));
        structures += last;
    }
    CHECK_EQUAL(structures, 5);
}

static void atomics_are_lock_free_and_aligned(void)
{
    struct ofs_control *control = fresh_control(0, 1);
    CHECK(atomic_is_lock_free(&control->magic) && atomic_is_lock_free(&control->space));
    CHECK_EQUAL(offsetof(struct ofs_control, readers) % 128, 0); /* consumers write here, the producer before it */
    CHECK_EQUAL(sizeof(struct ofs_bell) % 64, 0);
    free(control);
}

/* Each field of the header, wrong on its own, must be refused. */
static void control_is_valid_only_whole(void)
{
    struct ofs_control *control = fresh_control(64, 1);
    uint64_t size = ofs_control_size();
    CHECK(ofs_control_valid(control, size));
    CHECK(!ofs_control_valid(control, size - 1));
    CHECK(!ofs_control_valid(control, size + 4096));
    CHECK(!ofs_control_valid(control, sizeof *control - 1));
    CHECK(!ofs_control_valid(control, 0));
#define WRONG(field, value)                                   \
    do {                                                      \
        struct ofs_control saved = *control;                  \
        control->field = (value);                             \
        CHECK(!ofs_control_valid(control, size));             \
        *control = saved;                                     \
        CHECK(ofs_control_valid(control, size));              \
    } while (0)
    WRONG(magic, 0);
    WRONG(magic, OFS_MAGIC_DIRECTORY);
    WRONG(version, OFS_LAYOUT_VERSION + 1);
    WRONG(size, size + 1);
#undef WRONG
    free(control);
    /* Everything agrees, but the blocks would end behind the segment. */
    control = fresh_control(64, 1);
    control->size = size - 128;
    CHECK(!ofs_control_valid(control, size - 128));
    free(control);
    /* A segment that ends within the header: nothing behind its end may be read. */
    uint64_t *cut = zeroed(16);
    cut[0] = OFS_MAGIC_CONTROL;
    cut[1] = OFS_LAYOUT_VERSION;
    CHECK(!ofs_control_valid((struct ofs_control *)(void *)cut, 16));
    free(cut);
    cut = zeroed(4);
    CHECK(!ofs_control_valid((struct ofs_control *)(void *)cut, 4));
    free(cut);
}

static void directory_is_valid_only_whole(void)
{
    struct ofs_directory *directory = zeroed(sizeof *directory);
    CHECK(!ofs_directory_valid(directory, sizeof *directory) && !ofs_directory_made(directory, sizeof *directory));
    ofs_directory_make(directory);
    CHECK(ofs_directory_valid(directory, sizeof *directory) && ofs_directory_made(directory, sizeof *directory));
    CHECK(!ofs_directory_valid(directory, sizeof *directory - 1));
    CHECK(!ofs_directory_made(directory, 7));
    directory->version++;
    CHECK(!ofs_directory_valid(directory, sizeof *directory) && ofs_directory_made(directory, sizeof *directory));
    directory->version--;
    directory->size++;
    CHECK(!ofs_directory_valid(directory, sizeof *directory));
    free(directory);
    uint64_t *cut = zeroed(8);
    *cut = OFS_MAGIC_DIRECTORY;
    CHECK(!ofs_directory_valid((struct ofs_directory *)(void *)cut, 8));
    CHECK(!ofs_directory_made((struct ofs_directory *)(void *)cut, 4));
    free(cut);
    directory = zeroed(sizeof *directory);
    ofs_directory_make(directory);
    directory->size = sizeof *directory + 1;
    CHECK(!ofs_directory_valid(directory, sizeof *directory + 1));
    free(directory);
}

static void descriptors_stay_inside(void)
{
    struct ofs_control *control = fresh_control(64, 3);
    CHECK_EQUAL(ofs_blocks_ready(control), 3);
    ofs_blocks_extend(control, UINT32_MAX); /* a broken word must not lead outside */
    CHECK_EQUAL(ofs_blocks_ready(control), OFS_BLOCK_LIMIT);
    char *end = (char *)(ofs_block_at(control, OFS_BLOCK_LIMIT - 1) + 1);
    CHECK_EQUAL(end - (char *)control, ofs_control_size());
    CHECK_EQUAL(ofs_control_fixed_size(64), 4096 + 64 * 8);
    CHECK_EQUAL((char *)ofs_block_at(control, 0) - (char *)control, ofs_control_fixed_size(OFS_KEY_LIMIT));
    CHECK_EQUAL(ofs_block_offset(3), ofs_control_fixed_size(OFS_KEY_LIMIT) + 3 * sizeof(struct ofs_block));
    CHECK((char *)(ofs_control_keys(control) + OFS_KEY_LIMIT) <= (char *)ofs_block_at(control, 0));
    free(control);
}

/* A table larger than there is room for, or one whose mask would skip places, is no table. */
static void key_slots_stay_inside(void)
{
    struct ofs_control *control = fresh_control(64, 1);
    CHECK_EQUAL(ofs_control_key_slots(control), 64);
    uint32_t wrong[] = {63, 3, 2 * OFS_KEY_LIMIT, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ofs_store32_release(&control->key_slots, wrong[i]);
        CHECK_EQUAL(ofs_control_key_slots(control), 0);
        CHECK(ofs_control_valid(control, ofs_control_size()));
    }
    ofs_store32_release(&control->key_slots, OFS_KEY_LIMIT);
    CHECK_EQUAL(ofs_control_key_slots(control), OFS_KEY_LIMIT);
    free(control);
}

int main(void)
{
    alarm(60);
    rows_tile_each_structure();
    atomics_are_lock_free_and_aligned();
    control_is_valid_only_whole();
    directory_is_valid_only_whole();
    descriptors_stay_inside();
    key_slots_stay_inside();
    return 0;
}
