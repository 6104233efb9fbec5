#include "ofs_pack.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static int grow(struct ofs_pack *pack, size_t size)
{
    size_t room = pack->room ? pack->room : 512;
    while (room - pack->size < size) {
        if (room > SIZE_MAX / 2)
            return -1;
        room *= 2;
    }
    uint8_t *bytes = realloc(pack->bytes, room);
    if (bytes == NULL)
        return -1;
    pack->bytes = bytes;
    pack->room = room;
    return 0;
}

static inline uint8_t *more(struct ofs_pack *pack, size_t size)
{
    if (pack->room - pack->size < size && grow(pack, size))
        return NULL;
    uint8_t *at = pack->bytes + pack->size;
    pack->size += size;
    return at;
}

/* The highest byte first. */
static inline void put_big(uint8_t *at, uint64_t value, int width)
{
    for (int i = 0; i < width; i++)
        at[i] = (uint8_t)(value >> 8 * (width - 1 - i));
}

static inline int tagged(struct ofs_pack *pack, uint8_t tag, uint64_t value, int width)
{
    uint8_t *at = more(pack, 1 + (size_t)width);
    if (at == NULL)
        return -1;
    at[0] = tag;
    put_big(at + 1, value, width);
    return 0;
}

int ofs_pack_byte(struct ofs_pack *pack, uint8_t byte)
{
    return tagged(pack, byte, 0, 0);
}

int ofs_pack_unsigned(struct ofs_pack *pack, uint64_t value)
{
    if (value < 0x80)
        return tagged(pack, (uint8_t)value, 0, 0);
    if (value <= UINT8_MAX)
        return tagged(pack, 0xcc, value, 1);
    if (value <= UINT16_MAX)
        return tagged(pack, 0xcd, value, 2);
    if (value <= UINT32_MAX)
        return tagged(pack, 0xce, value, 4);
    return tagged(pack, 0xcf, value, 8);
}

int ofs_pack_signed(struct ofs_pack *pack, int64_t value)
{
    if (value >= 0)
        return ofs_pack_unsigned(pack, (uint64_t)value);
    if (value >= -32)
        return tagged(pack, (uint8_t)value, 0, 0);
    if (value >= INT8_MIN)
        return tagged(pack, 0xd0, (uint64_t)value, 1);
    if (value >= INT16_MIN)
        return tagged(pack, 0xd1, (uint64_t)value, 2);
    if (value >= INT32_MIN)
        return tagged(pack, 0xd2, (uint64_t)value, 4);
    return tagged(pack, 0xd3, (uint64_t)value, 8);
}

int ofs_pack_double(struct ofs_pack *pack, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return tagged(pack, 0xcb, bits, 8);
}

int ofs_pack_raw(struct ofs_pack *pack, const void *bytes, size_t size)
{
    uint8_t *at = more(pack, size);
    if (at == NULL)
        return -1;
    if (size > 0)
        memcpy(at, bytes, size);
    return 0;
}

/* A size in one of up to three widths: behind `tag`, `tag + 1`, `tag + 2`. */
static int sized(struct ofs_pack *pack, uint8_t tag, int narrowest, size_t size)
{
    int width = size <= UINT8_MAX ? 1 : size <= UINT16_MAX ? 2 : 4;
    if (width < narrowest)
        width = narrowest;
    uint8_t wider = (uint8_t)(width == narrowest ? 0 : width == 2 * narrowest ? 1 : 2);
    return tagged(pack, (uint8_t)(tag + wider), size, width);
}

int ofs_pack_str(struct ofs_pack *pack, const char *utf8, size_t size)
{
    uint8_t *at;
    if (size < 32) {
        at = more(pack, 1 + size);
        if (at == NULL)
            return -1;
        at[0] = (uint8_t)(0xa0 | size);
        memcpy(at + 1, utf8, size);
        return 0;
    }
    return sized(pack, 0xd9, 1, size) ? -1 : ofs_pack_raw(pack, utf8, size);
}

int ofs_pack_bin(struct ofs_pack *pack, const void *bytes, size_t size)
{
    return sized(pack, 0xc4, 1, size) ? -1 : ofs_pack_raw(pack, bytes, size);
}

int ofs_pack_list(struct ofs_pack *pack, size_t count)
{
    return count < 16 ? ofs_pack_byte(pack, (uint8_t)(0x90 | count)) : sized(pack, 0xdc, 2, count);
}

int ofs_pack_map(struct ofs_pack *pack, size_t count)
{
    return count < 16 ? ofs_pack_byte(pack, (uint8_t)(0x80 | count)) : sized(pack, 0xde, 2, count);
}

uint8_t *ofs_pack_ext(struct ofs_pack *pack, int8_t code, size_t size)
{
    bool fixed = size && size <= 16 && (size & (size - 1)) == 0;
    /* 0xd4 to 0xd8 are for 1, 2, 4, 8 and 16 bytes. */
    if (fixed ? ofs_pack_byte(pack, (uint8_t)(0xd4 + __builtin_ctzl(size))) : sized(pack, 0xc7, 1, size))
        return NULL;
    uint8_t *at = more(pack, 1 + size);
    if (at == NULL)
        return NULL;
    at[0] = (uint8_t)code;
    return at + 1;
}
