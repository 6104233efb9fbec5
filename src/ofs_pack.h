/* A growing run of bytes, and the values of MessagePack that are written behind each other into it, each in its shortest
 * form (https://github.com/msgpack/msgpack/blob/master/spec.md).
 *
 * The functions give 0, or -1 where there is no memory; what was written so far is then of no use any more.
 */
#ifndef OFS_PACK_H
#define OFS_PACK_H

#include <stddef.h>
#include <stdint.h>

struct ofs_pack {
    uint8_t *bytes; /* `free` it in the end */
    size_t size;
    size_t room;
};

int ofs_pack_byte(struct ofs_pack *pack, uint8_t byte); /* also nil (0xc0), false (0xc2) and true (0xc3) */
int ofs_pack_signed(struct ofs_pack *pack, int64_t value);
int ofs_pack_unsigned(struct ofs_pack *pack, uint64_t value);
int ofs_pack_double(struct ofs_pack *pack, double value);
int ofs_pack_raw(struct ofs_pack *pack, const void *bytes, size_t size); /* as they are */

/* Sizes from 2**32 on have no form; the caller refuses them. */
int ofs_pack_str(struct ofs_pack *pack, const char *utf8, size_t size);
int ofs_pack_bin(struct ofs_pack *pack, const void *bytes, size_t size);
int ofs_pack_list(struct ofs_pack *pack, size_t count); /* so many values follow */
int ofs_pack_map(struct ofs_pack *pack, size_t count);  /* so many pairs follow */
/* Gives where its `size` bytes are to be written, before the next call, which may move them; NULL: no memory. */
uint8_t *ofs_pack_ext(struct ofs_pack *pack, int8_t code, size_t size);

#endif
