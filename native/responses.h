/* Where the records of a Fetch response are. */

#ifndef KAFKA_MARSHAL_RESPONSES_H
#define KAFKA_MARSHAL_RESPONSES_H

#include "records.h"

#include <stdatomic.h>

/* The records of one partition, and the batches at their beginning. */
typedef struct {
    const unsigned char *begin, *end;
    Walk walk;
    Index index;
} Run;

typedef struct {
    int version; /* of Fetch; others are left */
    int step;
    const unsigned char *at, *end; /* ``at`` is behind what was read */
    int64_t topics, partitions;            /* to come, the latter of this topic */
    Run *runs;
    Py_ssize_t count;
} Response;

/* Begin with a response of a version, of which nothing was read. */
void begin_response(Response *self, const unsigned char *begin, const unsigned char *end,
                    int version);

/* Read it until it is stopped, by any thread. Takes no interpreter lock. What is no sound
 * response is left, and so is what there is no memory for. */
void read_response(Response *self, const atomic_int *is_stopped);

/* Return a list of the address of the records, their size and their index, for each
 * partition that has some; NULL on an error. */
PyObject *new_indexes(const Response *self);

/* Free what was read. Idempotent. */
void free_response(Response *self);

#endif
