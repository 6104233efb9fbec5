#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define WORDS 64u
#define VALUES 64u
#define STACK ((size_t)64 << 10)
#define OUTSIDE MODEL_THREADS /* set-up and checks before and after the threads */

struct view {
    uint32_t at[WORDS];
};

struct value {
    uint64_t value;
    struct view carried;
};

static struct {
    const void *address;
    struct value values[VALUES];
    uint32_t count;
} words[WORDS];

static uint32_t word_count;
static struct view views[MODEL_THREADS + 1], shared;
static unsigned running = OUTSIDE;
static bool ended[MODEL_THREADS];
static ucontext_t scheduler, contexts[MODEL_THREADS];
static char stacks[MODEL_THREADS][STACK];
static void (*bodies[MODEL_THREADS])(void);
static uint64_t *source;

static uint32_t draw(uint32_t limit)
{
    *source ^= *source >> 12;
    *source ^= *source << 25;
    *source ^= *source >> 27;
    return (uint32_t)((*source * 0x2545f4914f6cdd1du >> 33) % limit);
}

static void give_up(const char *why)
{
    fprintf(stderr, "model: %s\n", why);
    exit(2);
}

static void join(struct view *into, const struct view *from)
{
    for (uint32_t i = 0; i < word_count; i++)
        if (from->at[i] > into->at[i])
            into->at[i] = from->at[i];
}

static uint64_t memory(const void *word, unsigned width)
{
    uint64_t value = 0;
    memcpy(&value, word, width); /* little endian, like the layout */
    return value;
}

static uint32_t index_of(const void *word, unsigned width)
{
    for (uint32_t i = 0; i < word_count; i++)
        if (words[i].address == word)
            return i;
    if (word_count == WORDS)
        give_up("more words than the model has room for");
    words[word_count].address = word;
    words[word_count].values[0] = (struct value){.value = memory(word, width)};
    words[word_count].count = 1;
    return word_count++;
}

/* Any other thread may do something before each operation. */
static void step(void)
{
    if (running != OUTSIDE)
        swapcontext(&contexts[running], &scheduler);
}

static bool acquires(enum model_order order)
{
    return order == MODEL_ACQUIRE || order == MODEL_ACQREL || order == MODEL_SEQ;
}

static bool releases(enum model_order order)
{
    return order == MODEL_RELEASE || order == MODEL_ACQREL || order == MODEL_SEQ;
}

/* Read value number `at`, with what that brings. */
static uint64_t read_value(uint32_t word, uint32_t at, enum model_order order)
{
    struct view *view = &views[running];
    view->at[word] = at;
    if (acquires(order))
        join(view, &words[word].values[at].carried);
    return words[word].values[at].value;
}

static void append(uint32_t word, unsigned width, uint64_t value, enum model_order order, const struct view *continued)
{
    struct view *view = &views[running];
    uint32_t at = words[word].count;
    if (at == VALUES)
        give_up("more values of a word than the model has room for");
    words[word].count++;
    view->at[word] = at;
    struct value *made = &words[word].values[at];
    *made = (struct value){.value = value};
    if (continued)
        join(&made->carried, continued);
    if (releases(order))
        join(&made->carried, view);
    made->carried.at[word] = at;
    memcpy((void *)(uintptr_t)words[word].address, &value, width);
    if (order == MODEL_SEQ)
        shared.at[word] = at;
}

uint64_t model_load(const void *word, unsigned width, enum model_order order)
{
    step();
    uint32_t i = index_of(word, width);
    uint32_t oldest = running == OUTSIDE ? words[i].count - 1 : views[running].at[i];
    if (order == MODEL_SEQ && shared.at[i] > oldest)
        oldest = shared.at[i];
    return read_value(i, oldest + draw(words[i].count - oldest), order);
}

void model_store(void *word, unsigned width, uint64_t value, enum model_order order)
{
    step();
    append(index_of(word, width), width, value, order, NULL);
}

static void read_modify_write(uint32_t word, unsigned width, uint64_t value, enum model_order order)
{
    uint32_t newest = words[word].count - 1;
    read_value(word, newest, order);
    append(word, width, value, order, &words[word].values[newest].carried);
}

uint64_t model_change(void *word, unsigned width, enum model_change change, uint64_t operand, enum model_order order)
{
    step();
    uint32_t i = index_of(word, width);
    uint64_t before = words[i].values[words[i].count - 1].value;
    uint64_t after = change == MODEL_ADD ? before + operand : change == MODEL_AND ? before & operand : before | operand;
    read_modify_write(i, width, width == 4 ? (uint32_t)after : after, order);
    return before;
}

bool model_cas(void *word, unsigned width, uint64_t *expected, uint64_t value, enum model_order order)
{
    step();
    uint32_t i = index_of(word, width);
    uint64_t before = words[i].values[words[i].count - 1].value;
    if (before != *expected) {
        /* The real header asks for acquire on failure whatever success asks for. */
        *expected = read_value(i, words[i].count - 1, order == MODEL_RELAXED ? MODEL_RELAXED : MODEL_ACQUIRE);
        return false;
    }
    read_modify_write(i, width, value, order);
    return true;
}

static void start(void)
{
    bodies[running]();
    ended[running] = true;
}

void model_reset(uint64_t *random)
{
    source = random;
    word_count = 0;
    memset(views, 0, sizeof views);
    memset(&shared, 0, sizeof shared);
}

void model_run(void (*const *threads)(void), unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i];
        contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = &scheduler;
        bodies[i] = threads[i];
        ended[i] = false;
        views[i] = views[OUTSIDE]; /* starting a thread orders what came before */
        makecontext(&contexts[i], start, 0);
    }
    /* Some runs change threads at every step, some hardly ever: what takes twenty steps in a row must happen too. */
    static const uint32_t patience[] = {1, 6, 40};
    uint32_t stays = patience[draw(3)];
    unsigned next = draw(count);
    for (unsigned left = count; left;) {
        if (ended[next] || draw(stays) == 0)
            next = draw(count);
        if (ended[next])
            continue;
        running = next;
        swapcontext(&scheduler, &contexts[next]);
        left -= ended[next];
    }
    running = OUTSIDE;
    for (unsigned i = 0; i < count; i++)
        join(&views[OUTSIDE], &views[i]);
}
