/* The choice between two ways: fed with costs instead of a clock. */
#include "harness.h"

#include <pthread.h>

#include "ofs_choice.h"

#define MOST 1024u

static struct ofs_choice choice;

/* So many calls at these costs; how many of them went way 1. */
static unsigned calls(unsigned count, uint64_t zero, uint64_t one)
{
    unsigned ones = 0;
    for (unsigned i = 0; i < count; i++) {
        struct ofs_turn turn = ofs_choice_next(&choice, MOST);
        CHECK(turn.way <= 1);
        ones += turn.way;
        if (turn.judged)
            ofs_choice_cost(&choice, turn.way, turn.way ? one : zero);
    }
    return ones;
}

static void anew(void)
{
    memset((void *)&choice, 0, sizeof choice);
}

static void a_try_is_half_warming_up(void)
{
    anew();
    for (unsigned i = 0; i < 2 * OFS_TRY; i++) {
        struct ofs_turn turn = ofs_choice_next(&choice, MOST);
        CHECK_EQUAL(turn.way, i >= OFS_TRY);
        CHECK_EQUAL(turn.judged, i % OFS_TRY >= OFS_TRY - OFS_TRY_JUDGED);
        /* Cold calls and all judged ones but one of the better way are slow: neither counts. */
        if (turn.judged)
            ofs_choice_cost(&choice, turn.way, turn.way && i % OFS_TRY == OFS_TRY - 1 ? 50 : turn.way ? 900 : 100);
    }
    CHECK_EQUAL(calls(OFS_REST_LEAST, 100, 50), OFS_REST_LEAST);
}

static void it_settles_on_the_cheaper_way(void)
{
    anew();
    calls(2 * OFS_TRY, 100, 50);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 100, 50), OFS_REST_LEAST);
    anew();
    calls(2 * OFS_TRY, 50, 100);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 50, 100), 0);
}

static void way_1_wins_what_is_nearly_equal(void)
{
    anew();
    calls(2 * OFS_TRY, 950, 1000);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 950, 1000), OFS_REST_LEAST);
    anew();
    calls(2 * OFS_TRY, 930, 1000);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 930, 1000), 0);
}

/* All costs rise from time to time: what a try long ago has found counts no more. */
static void it_follows_a_change_both_ways(void)
{
    anew();
    for (unsigned time = 0; time < 6; time++) {
        uint64_t less = (uint64_t)100 << 2 * time, zero = time % 2 ? 2 * less : less, one = time % 2 ? less : 2 * less;
        calls(2 * (MOST + 2 * OFS_TRY), zero, one); /* however long it rests, a try is in there */
        unsigned many = 4 * MOST, ones = calls(many, zero, one);
        CHECK(time % 2 ? ones > many / 20 * 19 : ones < many / 20);
    }
}

static void after_a_change_it_tries_again_soon(void)
{
    anew();
    calls(20 * MOST, 100, 200);
    CHECK_EQUAL(ofs_load64_relaxed(&choice.rest), MOST);
    while (ofs_load64_relaxed(&choice.kept) == 0)
        calls(1, 200, 100);
    CHECK_EQUAL(ofs_load64_relaxed(&choice.rest), OFS_REST_LEAST);
}

static void the_loser_is_tried_less_and_less(void)
{
    anew();
    calls(40 * MOST, 100, 200);
    unsigned tries = 10;
    CHECK_EQUAL(calls(tries * (MOST + 2 * OFS_TRY + 1), 100, 200), tries * OFS_TRY);
}

/* As where other threads took all judged turns and have not come back: what is kept stays. */
static void without_costs_nothing_changes(void)
{
    for (unsigned way = 0; way < 2; way++) {
        anew();
        calls(2 * OFS_TRY + 1, way ? 100 : 50, way ? 50 : 100);
        for (unsigned i = 0; i < 4 * MOST; i++)
            ofs_choice_next(&choice, MOST);
        CHECK_EQUAL(ofs_load64_relaxed(&choice.kept), way);
    }
}

/* A clock that stands still, or stood still for one of the two. */
static void nothing_is_a_cost(void)
{
    anew();
    calls(2 * OFS_TRY, 0, 0);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 0, 0), OFS_REST_LEAST);
    anew();
    calls(2 * OFS_TRY, 0, 50);
    CHECK_EQUAL(calls(OFS_REST_LEAST, 0, 50), 0);
}

static void *many_calls(void *nothing)
{
    for (unsigned i = 0; i < scaled(200000); i++) {
        struct ofs_turn turn = ofs_choice_next(&choice, MOST);
        CHECK(turn.way <= 1);
        if (turn.judged)
            ofs_choice_cost(&choice, turn.way, turn.way ? 100 : 200);
    }
    return nothing;
}

static void several_threads(void)
{
    anew();
    pthread_t threads[3];
    for (unsigned i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, many_calls, NULL) == 0);
    for (unsigned i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    calls(2 * (MOST + 2 * OFS_TRY), 200, 100);
    CHECK(calls(4 * MOST, 200, 100) > 4 * MOST / 20 * 19);
}

int main(void)
{
    alarm(60);
    a_try_is_half_warming_up();
    it_settles_on_the_cheaper_way();
    way_1_wins_what_is_nearly_equal();
    it_follows_a_change_both_ways();
    after_a_change_it_tries_again_soon();
    the_loser_is_tried_less_and_less();
    without_costs_nothing_changes();
    nothing_is_a_cost();
    several_threads();
    return 0;
}
