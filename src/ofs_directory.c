#include "ofs_directory.h"

void ofs_directory_make(struct ofs_directory *directory)
{
    directory->version = OFS_LAYOUT_VERSION;
    directory->size = sizeof *directory;
    ofs_store64_release(&directory->magic, OFS_MAGIC_DIRECTORY); /* made */
}

bool ofs_directory_made(const struct ofs_directory *directory, uint64_t size)
{
    return size >= sizeof directory->magic && ofs_load64_acquire(&directory->magic) == OFS_MAGIC_DIRECTORY; /* made */
}

bool ofs_directory_valid(const struct ofs_directory *directory, uint64_t size)
{
    return size == sizeof *directory && ofs_load64_acquire(&directory->magic) == OFS_MAGIC_DIRECTORY && /* made */
           directory->version == OFS_LAYOUT_VERSION && directory->size == size;
}

int ofs_directory_enter(struct ofs_directory *directory, uint64_t endpoint)
{
    for (uint32_t i = 0; i < OFS_ENDPOINT_LIMIT; i++) {
        uint64_t nobody = 0;
        if (ofs_cas64_acqrel(&directory->endpoint[i], &nobody, endpoint)) {
            ofs_add32_release(&directory->epoch, 1); /* entered */
            return OFS_OK;
        }
    }
    return OFS_FULL;
}

void ofs_directory_leave(struct ofs_directory *directory, uint64_t endpoint)
{
    for (uint32_t i = 0; i < OFS_ENDPOINT_LIMIT; i++) {
        uint64_t expected = endpoint;
        if (ofs_cas64_acqrel(&directory->endpoint[i], &expected, 0)) {
            ofs_add32_release(&directory->epoch, 1); /* entered */
            return;
        }
    }
}

uint32_t ofs_directory_list(const struct ofs_directory *directory, uint64_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < OFS_ENDPOINT_LIMIT; i++) {
        uint64_t id = ofs_load64_acquire(&directory->endpoint[i]);
        if (id != 0)
            ids[count++] = id;
    }
    return count;
}

uint32_t ofs_directory_epoch(const struct ofs_directory *directory)
{
    return ofs_load32_acquire(&directory->epoch); /* entered */
}

uint64_t ofs_directory_stamp(struct ofs_directory *directory)
{
    return ofs_add64_relaxed(&directory->stamp, 1) + 1;
}

ofs_u32 *ofs_directory_bell(struct ofs_directory *directory, uint32_t hash)
{
    return &directory->bell[hash % OFS_BELLS].word;
}
