/* What src/ofs_fault.h calls in a build for crash tests: dies at the place that OMNI_FASTSHM_FAULT names, the
 * OMNI_FASTSHM_FAULT_SKIP+1st time that it comes there; appends each place it passes to the file OMNI_FASTSHM_FAULT_LOG.
 */
#include "ofs_fault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *log, const char *place)
{
    int fd = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, place, strlen(place)) < 0 || write(fd, "\n", 1) < 0)
        abort();
    close(fd);
}

void ofs_fault(const char *function, const char *word, const char *side)
{
    static long passed;
    const char *log = getenv("OMNI_FASTSHM_FAULT_LOG"), *wanted = getenv("OMNI_FASTSHM_FAULT");
    if (!log && !wanted)
        return;
    char place[160];
    snprintf(place, sizeof place, "%s %s %s", function, word, side);
    if (log)
        note(log, place);
    if (wanted && strcmp(wanted, place) == 0) {
        const char *skip = getenv("OMNI_FASTSHM_FAULT_SKIP");
        if (passed++ < (skip ? atol(skip) : 0))
            return;
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
}
