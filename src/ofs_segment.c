#define _GNU_SOURCE
#include "ofs_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ofs_fault.h"

#define HUGE_PAGE (2u << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

int ofs_segment_stat(int fd, struct ofs_stat *found)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    found->size = (uint64_t)st.st_size;
    found->allocated = (uint64_t)st.st_blocks * 512u;
    found->uid = st.st_uid;
    found->regular = S_ISREG(st.st_mode);
    found->linked = st.st_nlink > 0;
    return OFS_OK;
}

int ofs_segment_resize(int fd, uint64_t size)
{
    int rc;
    do
        rc = OFS_VISIBLE("length", ftruncate(fd, (off_t)size));
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? OFS_OK : -errno;
}

int ofs_segment_reserve(int fd, uint64_t offset, uint64_t size)
{
    int rc;
    do
        rc = OFS_VISIBLE("memory", posix_fallocate(fd, (off_t)offset, (off_t)size)); /* returns the error, does not set errno */
    while (rc == EINTR);
    return -rc;
}

static int open_again(int fd)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Beyond the object's end this fails, after it has filled all before. It takes 0.7 and 0.6 times as long as MAP_POPULATE, which
 * works on a kernel before 5.14 as well. */
static void fill_tables(void *at, uint64_t size, enum ofs_fill fill, int fd)
{
    if (size >= HUGE_PAGE)
        (void)madvise(at, size, MADV_HUGEPAGE); /* heard where the mount says `advise`; elsewhere its own setting holds */
    if (madvise(at, size, fill == OFS_FILL_NEW ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0 && errno == EINVAL)
        (void)mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0);
}

int ofs_segment_map(int fd, uint64_t size, enum ofs_fill fill, bool apart, void **base)
{
    int through = apart ? open_again(fd) : fd;
    if (through < 0 && errno != ENOENT)
        return -errno;
    if (through < 0) { /* no /proc here: then a forked child keeps the locks, and that is all */
        through = fd;
        apart = false;
    }
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, through, 0);
    int rc = at == MAP_FAILED ? -errno : OFS_OK;
    if (rc == OFS_OK && fill != OFS_FILL_LATER)
        fill_tables(at, size, fill, through);
    if (apart)
        close(through);
    if (rc == OFS_OK)
        *base = at;
    return rc;
}

void ofs_segment_populate(void *at, uint64_t size)
{
    uint64_t begun = (uintptr_t)at % (uint64_t)sysconf(_SC_PAGESIZE); /* of a page that has its table entry, most likely */
    (void)madvise((char *)at - begun, size + begun, MADV_POPULATE_WRITE); /* before Linux 5.14: a fault per page, once */
}

int ofs_segment_unmap(void *base, uint64_t size)
{
    return munmap(base, size) == 0 ? OFS_OK : -errno;
}

static struct flock one_byte(int byte, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
}

int ofs_lock_try(int fd, int byte, bool exclusive)
{
    struct flock lock = one_byte(byte, exclusive ? F_WRLCK : F_RDLCK);
    if (OFS_VISIBLE("lock", fcntl(fd, F_OFD_SETLK, &lock)) == 0)
        return OFS_OK;
    return errno == EAGAIN || errno == EACCES ? OFS_BUSY : -errno;
}

int ofs_lock_wait(int fd, int byte, bool exclusive)
{
    struct flock lock = one_byte(byte, exclusive ? F_WRLCK : F_RDLCK);
    if (OFS_VISIBLE("lock", fcntl(fd, F_OFD_SETLKW, &lock)) == 0)
        return OFS_OK;
    return errno == EINTR ? OFS_INTERRUPTED : -errno;
}

int ofs_lock_drop(int fd, int byte)
{
    struct flock lock = one_byte(byte, F_UNLCK);
    return OFS_VISIBLE("lock", fcntl(fd, F_OFD_SETLK, &lock)) == 0 ? OFS_OK : -errno;
}

int ofs_lock_held(int fd, int byte)
{
    struct flock lock = one_byte(byte, F_WRLCK);
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0)
        return -errno;
    return lock.l_type != F_UNLCK;
}
