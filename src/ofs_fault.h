/* Places to die at, in test builds only: before and after each change that another process can see.
 *
 * With OFS_FAULTS the operations of ofs_atomic.h that change a shared word, and the system calls marked OFS_VISIBLE, call
 * `ofs_fault` on both sides; its body (tests/native/fault.c) kills the process at the place that the environment names. A
 * place is named by function, word and side, so that a new operation is a new place by itself. Otherwise this file is
 * empty: nothing of it is in a released build.
 */
#ifndef OFS_FAULT_H
#define OFS_FAULT_H

#ifndef OFS_FAULTS

#define OFS_VISIBLE(what, call) (call)

#else

void ofs_fault(const char *function, const char *word, const char *side);

#define OFS_AROUND(word, change)                \
    ({                                          \
        ofs_fault(__func__, word, "before");    \
        __auto_type answer_ = (change);         \
        ofs_fault(__func__, word, "after");     \
        answer_;                                \
    })
#define OFS_AROUND_STORE(word, change)       \
    ({                                       \
        ofs_fault(__func__, word, "before"); \
        (change);                            \
        ofs_fault(__func__, word, "after");  \
    })

#define OFS_VISIBLE(what, call) OFS_AROUND(what, call)

/* A macro's own name is not replaced in its expansion: these reach the functions. */
#define ofs_store64_release(word, value) OFS_AROUND_STORE(#word, ofs_store64_release(word, value))
#define ofs_store32_release(word, value) OFS_AROUND_STORE(#word, ofs_store32_release(word, value))
#define ofs_add64_relaxed(word, value) OFS_AROUND(#word, ofs_add64_relaxed(word, value))
#define ofs_add32_release(word, value) OFS_AROUND(#word, ofs_add32_release(word, value))
#define ofs_and64_seq(word, mask) OFS_AROUND(#word, ofs_and64_seq(word, mask))
#define ofs_and32_acqrel(word, mask) OFS_AROUND(#word, ofs_and32_acqrel(word, mask))
#define ofs_or32_seq(word, bits) OFS_AROUND(#word, ofs_or32_seq(word, bits))
#define ofs_cas64_acqrel(word, expected, value) OFS_AROUND(#word, ofs_cas64_acqrel(word, expected, value))
#define ofs_cas64_seq(word, expected, value) OFS_AROUND(#word, ofs_cas64_seq(word, expected, value))
#define ofs_cas32_acqrel(word, expected, value) OFS_AROUND(#word, ofs_cas32_acqrel(word, expected, value))

#endif
#endif
