#include "ofs_choice.h"

/* Stores are a release only because the core has no weaker ones: nothing is published by them. */

/* Way 1 unless the other one is cheaper by more than a sixteenth. */
static uint64_t decided(const struct ofs_choice *choice, uint64_t kept)
{
    uint64_t zero = ofs_load64_relaxed(&choice->cheapest[0]), one = ofs_load64_relaxed(&choice->cheapest[1]);
    if (zero == 0 || one == 0)
        return kept;
    return zero < one - one / 16 ? 0 : 1;
}

struct ofs_turn ofs_choice_next(struct ofs_choice *choice, uint64_t most)
{
    uint64_t turn = ofs_add64_relaxed(&choice->turn, 1);
    uint64_t kept = ofs_load64_relaxed(&choice->kept), rest = ofs_load64_relaxed(&choice->rest);
    if (turn < 2 * OFS_TRY) {
        bool other = turn >= OFS_TRY;
        return (struct ofs_turn){(unsigned)kept ^ other, turn % OFS_TRY >= OFS_TRY - OFS_TRY_JUDGED};
    }
    if (turn == 2 * OFS_TRY) { /* for one thread only */
        uint64_t better = decided(choice, kept);
        rest = better != kept || rest == 0 ? OFS_REST_LEAST : 2 * rest;
        ofs_store64_release(&choice->rest, rest < most ? rest : most);
        ofs_store64_release(&choice->kept, better);
        kept = better;
    } else if (turn >= 2 * OFS_TRY + rest) {
        ofs_store64_release(&choice->cheapest[0], 0);
        ofs_store64_release(&choice->cheapest[1], 0);
        ofs_store64_release(&choice->turn, 0);
    }
    return (struct ofs_turn){(unsigned)kept, false};
}

void ofs_choice_cost(struct ofs_choice *choice, unsigned way, uint64_t cost)
{
    uint64_t seen = ofs_load64_relaxed(&choice->cheapest[way]);
    if (seen == 0 || cost < seen)
        ofs_store64_release(&choice->cheapest[way], cost ? cost : 1);
}
