#include "ofs_layout.h"

/* Each row carries where the field must be: a compiler that disagrees, or an edit that shifts something, fails here. */
#define ROW(structure_, field_, offset_, size_)                                                                      \
    _Static_assert(offsetof(struct structure_, field_) == (offset_), #structure_ "." #field_ " moved");              \
    _Static_assert(sizeof(((struct structure_ *)0)->field_) == (size_), #structure_ "." #field_ " changed size");
#include "ofs_layout_rows.h"
#undef ROW

#define ROW(structure_, field_, offset_, size_) {#structure_, #field_, offset_, size_},
static const struct ofs_field fields[] = {
#include "ofs_layout_rows.h"
};
#undef ROW

_Static_assert(sizeof(struct ofs_block) == 128, "a descriptor is two cache lines");
_Static_assert(sizeof(struct ofs_reader) == 16, "size of ofs_reader");
_Static_assert(sizeof(struct ofs_control) == 4096, "the control header is one page");
_Static_assert(sizeof(struct ofs_bell) == 64, "one bell per cache line");
_Static_assert(sizeof(struct ofs_directory) == 16384, "the directory is four pages");

const struct ofs_field *ofs_layout_fields(size_t *count)
{
    *count = sizeof fields / sizeof fields[0];
    return fields;
}
