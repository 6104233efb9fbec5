/* Every structure that lives in shared memory, and the meaning of each shared word.
 *
 * A producing endpoint owns one control segment (struct ofs_control, then room for the largest key table, then the block
 * table) and data segments that hold payload bytes only. Where the tables are is the same in every control segment: were
 * it read from shared memory, a stray write of another process could lead us anywhere. A namespace has one directory segment. All sizes and offsets are 64
 * bit, there are no addresses, padding is written out. ofs_layout.c asserts each field; docs/layout.md is rendered
 * from the same table. Any change here changes OFS_LAYOUT_VERSION.
 */
#ifndef OFS_LAYOUT_H
#define OFS_LAYOUT_H

#include <stddef.h>

#include "ofs_atomic.h"
#include "ofs_fault.h"
#include "ofs_status.h"

#define OFS_LAYOUT_VERSION 2u
#define OFS_MAGIC_CONTROL 0x314c54434d4e4fu   /* "ONMCTL1", little endian: stored last when a segment is made */
#define OFS_MAGIC_DIRECTORY 0x315249444d4e4fu /* "ONMDIR1" */

#define OFS_READER_SLOTS 32u      /* one bit each in a block's word */
#define OFS_SHARED_SLOT 31u       /* the short-lived slot of readers that found no other free */
#define OFS_BLOCK_LIMIT 131072u   /* descriptors a control segment can grow to */
#define OFS_BLOCK_CHUNK 256u      /* descriptors that become usable at a time */
#define OFS_KEY_LIMIT 262144u     /* entries a key table can have: twice the descriptors, so that look-ups stay short */
#define OFS_ENDPOINT_LIMIT 1024u  /* producing endpoints of a namespace */
#define OFS_BELLS 64u             /* arrival words of a namespace, hashed by receiving stage */

/* Bytes of the files that processes lock to show that they live (open file description locks: the kernel drops
 * them at death, in whatever PID namespace the process was). In a control segment: */
#define OFS_LOCK_OWNER 0    /* the producer, exclusively */
#define OFS_LOCK_READER0 1  /* + slot number: the process that has this slot, exclusively */
/* In a directory: */
#define OFS_LOCK_MAKER 0    /* whoever is making or removing it, exclusively */
#define OFS_LOCK_USERS 1    /* every endpoint that uses it, shared */

/* One payload's place. `word` is the only thing that other processes change:
 *   bits 63..40 generation, 39..32 pending (takers still to come), 31..0 holders (one bit per reader slot).
 * The block is free when pending and holders are both zero. The other fields are written by the producer while the
 * block is free and are constant until it is free again. */
struct ofs_block {
    ofs_u64 word;
    ofs_u64 sequence;      /* number of this publication, never reused by this producer */
    ofs_u64 edge;          /* hash of (from_stage, to_stage) */
    ofs_u64 request_high;  /* hash of the request id */
    ofs_u64 request_low;
    ofs_u64 offset;        /* of the frame in its data segment */
    ofs_u64 frame_size;    /* bytes of the frame */
    ofs_u64 total_size;    /* frame plus the pieces that stay where they are (loans) */
    ofs_u64 stamp;         /* order among all producers of the namespace; 0 without key look-up */
    ofs_u64 published_ns;  /* CLOCK_MONOTONIC */
    ofs_u32 segment;       /* number k of the data segment "….d<k>" */
    ofs_u32 flags;         /* OFS_FLAG_… */
    uint8_t reserved[40];
};

#define OFS_FLAG_SHARED 1u   /* several takers: views must be read-only */
#define OFS_FLAG_EXTERNAL 2u /* some bytes lie outside the frame, in other data segments of the same producer */

/* For people only (`omni-fastshm ls`): decisions rest on the slot's lock. */
struct ofs_reader {
    ofs_u64 pid;
    ofs_u64 since_ns;
};

/* Start of a control segment. */
struct ofs_control {
    ofs_u64 magic;         /* OFS_MAGIC_CONTROL once everything else stands */
    uint32_t version;      /* OFS_LAYOUT_VERSION */
    ofs_u32 key_slots;     /* entries of the key table: 0 or a power of two */
    uint64_t endpoint;     /* random id, also in the name */
    uint64_t size;         /* of the whole segment */
    uint64_t pid;
    uint64_t created_ns;   /* CLOCK_MONOTONIC */
    uint64_t orphan_ttl_ns;
    uint8_t reserved0[72];
    ofs_u32 blocks_ready;  /* descriptors below this exist; written by the producer */
    ofs_u32 retired;       /* counts data segments given up: consumers drop idle mappings when it changes */
    ofs_u32 closed;        /* 1 once nothing more will come: it closed, or its heir tidied up */
    uint32_t reserved1;
    ofs_u64 died_ns;       /* when somebody first found the producer dead; 0 = alive as far as known */
    uint8_t reserved2[104];
    ofs_u32 readers;       /* slots that may have bits in block words; set before, cleared after */
    ofs_u32 space;         /* bell: rung when a block becomes free and the producer waits */
    uint8_t reserved3[120];
    struct ofs_reader reader[OFS_READER_SLOTS];
    uint8_t reserved4[3200];
};

/* An arrival word alone on its cache line: waiters of different stages do not disturb each other. */
struct ofs_bell {
    ofs_u32 word;          /* bit 0: somebody sleeps; bits 31..1: count of rings */
    uint8_t reserved[60];
};

/* The directory of a namespace. */
struct ofs_directory {
    ofs_u64 magic;         /* OFS_MAGIC_DIRECTORY once everything else stands */
    uint32_t version;
    uint32_t reserved0;
    uint64_t size;
    uint8_t reserved1[104];
    ofs_u32 epoch;         /* counts changes of the endpoint list */
    uint32_t reserved2;
    ofs_u64 stamp;         /* last stamp given to a payload */
    uint8_t reserved3[112];
    ofs_u64 endpoint[OFS_ENDPOINT_LIMIT]; /* ids of producing endpoints; 0 = free */
    struct ofs_bell bell[OFS_BELLS];
    uint8_t reserved4[3840];
};

/* One row per field, for tests, documents and tools. */
struct ofs_field {
    const char *structure;
    const char *name;
    size_t offset;
    size_t size;
};

/* The table of all fields; `*count` receives the number of rows. */
const struct ofs_field *ofs_layout_fields(size_t *count);

#endif
