#include "ofs_block.h"

#include "ofs_wait.h"

#define GENERATION_ONE ((uint64_t)1 << 40)
#define PENDING_ONE ((uint64_t)1 << 32)
#define PENDING_MASK ((uint64_t)0xff << 32)
#define HOLDERS_MASK ((uint64_t)0xffffffff)
#define IN_USE (PENDING_MASK | HOLDERS_MASK)

uint64_t ofs_control_fixed_size(uint32_t key_slots)
{
    return sizeof(struct ofs_control) + (uint64_t)key_slots * sizeof(ofs_u64);
}

uint64_t ofs_block_offset(uint32_t index)
{
    return ofs_control_fixed_size(OFS_KEY_LIMIT) + (uint64_t)index * sizeof(struct ofs_block);
}

uint64_t ofs_control_size(void)
{
    return ofs_block_offset(OFS_BLOCK_LIMIT);
}

void ofs_control_make(struct ofs_control *control, uint64_t endpoint, uint32_t key_slots, uint64_t orphan_ttl_ns,
                      uint64_t pid)
{
    control->version = OFS_LAYOUT_VERSION;
    control->endpoint = endpoint;
    control->size = ofs_control_size();
    control->pid = pid;
    control->created_ns = ofs_now_ns();
    control->orphan_ttl_ns = orphan_ttl_ns;
    ofs_store32_release(&control->key_slots, key_slots);
    ofs_store64_release(&control->magic, OFS_MAGIC_CONTROL); /* made */
}

bool ofs_control_valid(const struct ofs_control *control, uint64_t size)
{
    if (size < sizeof *control || ofs_load64_acquire(&control->magic) != OFS_MAGIC_CONTROL) /* made */
        return false;
    return control->version == OFS_LAYOUT_VERSION && control->size == size && ofs_control_size() == size;
}

struct ofs_block *ofs_block_at(struct ofs_control *control, uint32_t index)
{
    return (struct ofs_block *)((char *)control + ofs_block_offset(index));
}

uint32_t ofs_blocks_ready(const struct ofs_control *control)
{
    uint32_t ready = ofs_load32_acquire(&control->blocks_ready); /* ready */
    return ready < OFS_BLOCK_LIMIT ? ready : OFS_BLOCK_LIMIT;
}

void ofs_blocks_extend(struct ofs_control *control, uint32_t count)
{
    ofs_store32_release(&control->blocks_ready, count); /* ready */
}

bool ofs_block_free(const struct ofs_block *block)
{
    /* released: sees all that a releasing reader did before; `seq` because a waiting producer looks here after it
     * announced itself (space). */
    return (ofs_load64_seq(&block->word) & IN_USE) == 0;
}

bool ofs_block_pending(const struct ofs_block *block)
{
    return (ofs_load64_acquire(&block->word) & PENDING_MASK) != 0;
}

uint64_t ofs_block_sequence(const struct ofs_block *block)
{
    return ofs_load64_acquire(&block->sequence);
}

uint32_t ofs_block_takes(const struct ofs_block *block)
{
    return (uint32_t)((ofs_load64_acquire(&block->word) & PENDING_MASK) >> 32);
}

uint32_t ofs_block_holders(const struct ofs_block *block)
{
    return (uint32_t)(ofs_load64_acquire(&block->word) & HOLDERS_MASK);
}

void ofs_block_publish(struct ofs_block *block, const struct ofs_content *content, uint64_t sequence, uint32_t takers)
{
    uint64_t generation = (ofs_load64_relaxed(&block->word) & ~IN_USE) + GENERATION_ONE;
    /* content: a reader of the block's former life that sees any of these must also see that life ended, and a key
     * look-up that sees a new field must see the new sequence: hence release on each, sequence first. */
    ofs_store64_release(&block->sequence, sequence);
    ofs_store64_release(&block->edge, content->key.edge);
    ofs_store64_release(&block->request_high, content->key.request_high);
    ofs_store64_release(&block->request_low, content->key.request_low);
    ofs_store64_release(&block->offset, content->offset);
    ofs_store64_release(&block->frame_size, content->frame_size);
    ofs_store64_release(&block->total_size, content->total_size);
    ofs_store64_release(&block->stamp, content->stamp);
    ofs_store64_release(&block->published_ns, content->published_ns);
    ofs_store32_release(&block->segment, content->segment);
    ofs_store32_release(&block->flags, content->flags);
    ofs_store64_release(&block->word, generation | (uint64_t)takers << 32); /* published */
}

void ofs_block_read(const struct ofs_block *block, struct ofs_content *content)
{
    content->key.edge = ofs_load64_acquire(&block->edge);
    content->key.request_high = ofs_load64_acquire(&block->request_high);
    content->key.request_low = ofs_load64_acquire(&block->request_low);
    content->offset = ofs_load64_acquire(&block->offset);
    content->frame_size = ofs_load64_acquire(&block->frame_size);
    content->total_size = ofs_load64_acquire(&block->total_size);
    content->stamp = ofs_load64_acquire(&block->stamp);
    content->published_ns = ofs_load64_acquire(&block->published_ns);
    content->segment = ofs_load32_acquire(&block->segment);
    content->flags = ofs_load32_acquire(&block->flags);
}

static void set_free(struct ofs_control *control, struct ofs_block *block, uint64_t bits)
{
    uint64_t before = ofs_and64_seq(&block->word, ~bits); /* released, space */
    if ((before & IN_USE & ~bits) == 0)
        ofs_bell_ring_if_heard(&control->space);
}

int ofs_block_hold(struct ofs_control *control, uint32_t index, uint64_t sequence, uint32_t slot,
                   struct ofs_content *content)
{
    if (index >= ofs_blocks_ready(control))
        return OFS_GONE;
    struct ofs_block *block = ofs_block_at(control, index);
    uint64_t bit = (uint64_t)1 << slot;
    uint64_t word = ofs_load64_acquire(&block->word); /* published */
    do {
        if ((word & PENDING_MASK) == 0 || ofs_load64_acquire(&block->sequence) != sequence)
            return OFS_GONE;
    } while (!ofs_cas64_acqrel(&block->word, &word, word | bit)); /* published */
    /* The generation could have wrapped between the look and the swap; the sequence cannot. */
    if (ofs_load64_acquire(&block->sequence) != sequence) {
        if (!(word & bit))
            set_free(control, block, bit);
        return OFS_GONE;
    }
    ofs_block_read(block, content);
    return OFS_OK;
}

int ofs_block_take(struct ofs_control *control, uint32_t index)
{
    struct ofs_block *block = ofs_block_at(control, index);
    uint64_t word = ofs_load64_acquire(&block->word);
    do {
        if ((word & PENDING_MASK) == 0)
            return OFS_GONE;
    } while (!ofs_cas64_acqrel(&block->word, &word, word - PENDING_ONE));
    return OFS_OK;
}

void ofs_block_release(struct ofs_control *control, uint32_t index, uint32_t slot)
{
    set_free(control, ofs_block_at(control, index), (uint64_t)1 << slot);
}

int ofs_block_cancel(struct ofs_control *control, uint32_t index, uint64_t sequence)
{
    struct ofs_block *block = ofs_block_at(control, index);
    uint64_t word = ofs_load64_acquire(&block->word);
    do {
        if ((word & PENDING_MASK) == 0 || ofs_load64_acquire(&block->sequence) != sequence)
            return OFS_GONE;
    } while (!ofs_cas64_seq(&block->word, &word, word & ~PENDING_MASK)); /* space */
    if ((word & HOLDERS_MASK) == 0)
        ofs_bell_ring_if_heard(&control->space);
    return OFS_OK;
}

uint32_t ofs_request_cancel(struct ofs_control *control, uint64_t request_high, uint64_t request_low)
{
    uint32_t cancelled = 0, ready = ofs_blocks_ready(control);
    for (uint32_t i = 0; i < ready; i++) {
        struct ofs_block *block = ofs_block_at(control, i);
        /* content: the sequence before everything else; if the block is published anew meanwhile, the cancellation below
         * finds another one. Read after the look at `pending`, it could be the next life's with this life's request. */
        uint64_t sequence = ofs_load64_acquire(&block->sequence);
        if (!ofs_block_pending(block))
            continue;
        if (ofs_load64_acquire(&block->request_high) == request_high &&
            ofs_load64_acquire(&block->request_low) == request_low)
            cancelled += ofs_block_cancel(control, i, sequence) == OFS_OK;
    }
    return cancelled;
}

void ofs_reader_clear(struct ofs_control *control, uint32_t slot)
{
    uint64_t bit = (uint64_t)1 << slot;
    uint32_t ready = ofs_blocks_ready(control);
    for (uint32_t i = 0; i < ready; i++) {
        struct ofs_block *block = ofs_block_at(control, i);
        if (ofs_load64_acquire(&block->word) & bit)
            set_free(control, block, bit);
    }
}

void ofs_reader_mark(struct ofs_control *control, uint32_t slot, uint64_t pid)
{
    ofs_store64_release(&control->reader[slot].pid, pid);
    ofs_store64_release(&control->reader[slot].since_ns, ofs_now_ns());
    ofs_or32_seq(&control->readers, (uint32_t)1 << slot);
}

void ofs_reader_unmark(struct ofs_control *control, uint32_t slot)
{
    ofs_and32_acqrel(&control->readers, ~((uint32_t)1 << slot));
}

uint32_t ofs_readers(const struct ofs_control *control)
{
    return ofs_load32_acquire(&control->readers);
}

void ofs_segment_retired(struct ofs_control *control)
{
    ofs_add32_release(&control->retired, 1);
}

uint32_t ofs_segments_retired(const struct ofs_control *control)
{
    return ofs_load32_acquire(&control->retired);
}

void ofs_control_close(struct ofs_control *control)
{
    ofs_store32_release(&control->closed, 1);
}

bool ofs_control_closed(const struct ofs_control *control)
{
    return ofs_load32_acquire(&control->closed) != 0;
}

uint64_t ofs_control_died(struct ofs_control *control)
{
    uint64_t known = 0, now = ofs_now_ns();
    return ofs_cas64_acqrel(&control->died_ns, &known, now) ? now : known;
}

uint64_t ofs_control_orphan_ttl(const struct ofs_control *control)
{
    return control->orphan_ttl_ns;
}

uint64_t ofs_control_endpoint(const struct ofs_control *control)
{
    return control->endpoint;
}

ofs_u64 *ofs_control_keys(struct ofs_control *control)
{
    return (ofs_u64 *)((char *)control + sizeof *control);
}

uint32_t ofs_control_key_slots(const struct ofs_control *control)
{
    uint32_t slots = ofs_load32_acquire(&control->key_slots);
    return (slots & (slots - 1)) == 0 && slots <= OFS_KEY_LIMIT ? slots : 0;
}

ofs_u32 *ofs_control_space(struct ofs_control *control)
{
    return &control->space;
}
