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
    Run *runs; /* must be freed */
    Py_ssize_t count;
} Response;

/* Index the records of a response of this Fetch version, until any thread sets
 * ``is_stopped``. Takes no interpreter lock. Stops early where the response is malformed,
 * and without memory. */
void read_response(Response *self, Reader in, int version, const atomic_int *is_stopped);

/* Return a list of the address of the records, their size and their index, for each
 * partition that has some; NULL on an error. */
PyObject *new_indexes(const Response *self);

/* Free what was read. Idempotent. */
void free_response(Response *self);

#endif
