/* Memory and liveness: checking, reserving, mapping and locking the descriptors of shared memory objects.
 *
 * Names are made, opened and unlinked elsewhere (posix_ipc); this file has the only mmap, fallocate and lock calls.
 * Mapping and reserving may take long (the kernel clears pages); nothing here waits for another process, except
 * ofs_lock_wait. Errors are negative errno values.
 */
#ifndef OFS_SEGMENT_H
#define OFS_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ofs_status.h"

/* What stands behind a descriptor. */
struct ofs_stat {
    uint64_t size;
    uint64_t allocated;  /* bytes that really take memory */
    uint64_t uid;
    bool regular;
    bool linked;         /* its name still exists */
};

int ofs_segment_stat(int fd, struct ofs_stat *found);

/* Set the length without taking memory. */
int ofs_segment_resize(int fd, uint64_t size);

/* Take the memory for [offset, offset + size) now: -ENOSPC today instead of SIGBUS some day. */
int ofs_segment_reserve(int fd, uint64_t offset, uint64_t size);

/* Page tables: left to faults; or filled, over memory that is new, or over what somebody else has written. */
enum ofs_fill { OFS_FILL_LATER, OFS_FILL_NEW, OFS_FILL_WRITTEN };

/* Map `size` bytes for reading and writing, also beyond the object's end, where nobody may look before it has grown.
 * `fill` also fills the page tables, so that no fault comes later; large ones ask for huge pages.
 * `apart` maps through an open file description of its own: a mapping keeps its description, and with it the locks, and a
 * forked child inherits the mapping, so a dead process would count as alive for as long as its child lives. */
int ofs_segment_map(int fd, uint64_t size, enum ofs_fill fill, bool apart, void **base);

/* The object has grown by `size` bytes: fill the page tables of what is mapped there. */
void ofs_segment_populate(void *at, uint64_t size);

int ofs_segment_unmap(void *base, uint64_t size);

/* Lock one byte of the file for this descriptor's open file description; OFS_BUSY when another has it. */
int ofs_lock_try(int fd, int byte, bool exclusive);

/* The same, but wait. The kernel drops the lock of a process that dies, so the wait ends. */
int ofs_lock_wait(int fd, int byte, bool exclusive);

int ofs_lock_drop(int fd, int byte);

/* Does another open file description hold this byte? 1, 0 or a negative errno. */
int ofs_lock_held(int fd, int byte);

#endif
