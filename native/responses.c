/* Finds the records in Fetch responses, as ``kafka_io/responses.py`` does in Python.
 *
 * It checks and indexes their batches while the application does something else.
 */

#include "responses.h"

#include <stdlib.h>

/* Fetch versions in which fields appear; FIRST to LATEST are understood. */
enum { FIRST = 4, LOG_START = 5, SESSION = 7, REPLICA = 11, FLEXIBLE = 12, TOPIC_ID = 13 };
#define LATEST TOPIC_ID
#define UUID_BYTES 16
#define ABORTED_BYTES 16 /* of an aborted transaction, without its tags */
#define RUNS_MAX 100000

/* --- fields; NOT_READ if one is not there ----------------------------------------- */

static int skip(Reader *in, int64_t size) {
    if (size < 0 || size > in->end - in->at) return NOT_READ;
    in->at += size;
    return READ;
}

static int read_unsigned(Reader *in, int64_t *found) {
    *found = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (in->at >= in->end) return NOT_READ;
        unsigned char byte = *in->at++;
        *found |= (int64_t)(byte & 127) << shift;
        if (byte < 128) return READ;
    }
    return NOT_READ;
}

/* Read a length or a number of elements: it has ``bytes`` bytes in ordinary versions, and
 * is a varint in flexible ones. It is -1 for null. */
static int read_size(Reader *in, int version, int bytes, int64_t *found) {
    if (version >= FLEXIBLE) {
        int result = read_unsigned(in, found);
        *found -= 1;
        return result;
    }
    if (in->end - in->at < bytes) return NOT_READ;
    uint32_t number = 0;
    for (int i = 0; i < bytes; i++) number = number << 8 | *in->at++;
    *found = bytes == 2 ? (int16_t)number : (int32_t)number;
    return READ;
}

static int skip_tags(Reader *in, int version) {
    int64_t count, size;
    if (version < FLEXIBLE) return READ;
    if (!read_unsigned(in, &count)) return NOT_READ;
    while (count-- > 0)
        if (!read_unsigned(in, &size) || !read_unsigned(in, &size) || !skip(in, size))
            return NOT_READ;
    return READ;
}

/* --- records --------------------------------------------------------------------------- */

/* Make room for one more run; NULL without memory, or if there are too many. */
static Run *add_run(Response *self) {
    if (self->count == RUNS_MAX) return NULL;
    /* Room is doubled when it is full. */
    if ((self->count & (self->count - 1)) == 0) {
        size_t room = self->count ? 2 * (size_t)self->count : 1;
        Run *runs = realloc(self->runs, room * sizeof(Run));
        if (runs == NULL) return NULL;
        self->runs = runs;
    }
    return &self->runs[self->count++];
}

/* Index the batches of a partition; NOT_READ if it was stopped, or has no memory for
 * more. */
static int read_run(Reader *in, int64_t size, Response *self, const atomic_int *is_stopped) {
    const unsigned char *begin = in->at;
    Run *run = skip(in, size) ? add_run(self) : NULL;
    if (run == NULL) return NOT_READ;
    *run = (Run){
        .begin = begin,
        .end = in->at,
        .walk = {.count_max = PY_SSIZE_T_MAX, .epoch_min = INT32_MIN, .is_checked = 1},
        .index = {.is_dense = 1},
    };
    begin_index(begin, &run->walk, &run->index);
    int result = READ;
    while (result == READ && !atomic_load(is_stopped))
        result = index_next(begin, run->end, &run->walk, &run->index);
    return result != READ;
}

static int read_partition(Reader *in, int version, Response *self,
                          const atomic_int *is_stopped) {
    int64_t aborted, size;
    /* Index, error, high watermark, last stable offset, log start. */
    if (!skip(in, version >= LOG_START ? 30 : 22) || !read_size(in, version, 4, &aborted))
        return NOT_READ;
    while (aborted-- > 0)
        if (!skip(in, ABORTED_BYTES) || !skip_tags(in, version)) return NOT_READ;
    if ((version >= REPLICA && !skip(in, 4)) || !read_size(in, version, 4, &size))
        return NOT_READ;
    if (size > 0 && !read_run(in, size, self, is_stopped)) return NOT_READ;
    return skip_tags(in, version);
}

static int read_topic(Reader *in, int version, Response *self,
                      const atomic_int *is_stopped) {
    int64_t size = UUID_BYTES, partitions;
    if ((version < TOPIC_ID && !read_size(in, version, 2, &size)) || !skip(in, size) ||
        !read_size(in, version, 4, &partitions))
        return NOT_READ;
    while (partitions-- > 0)
        if (!read_partition(in, version, self, is_stopped)) return NOT_READ;
    return skip_tags(in, version);
}

/* --- responses ------------------------------------------------------------------------- */

void read_response(Response *self, Reader in, int version, const atomic_int *is_stopped) {
    int64_t topics;
    /* Skip the correlation id, tags, throttle time, and with sessions error and id. */
    if (version < FIRST || version > LATEST || !skip(&in, 4) || !skip_tags(&in, version) ||
        !skip(&in, version >= SESSION ? 10 : 4) || !read_size(&in, version, 4, &topics))
        return;
    while (topics-- > 0)
        if (!read_topic(&in, version, self, is_stopped)) return;
}

PyObject *new_indexes(const Response *self) {
    PyObject *found = PyList_New(self->count);
    for (Py_ssize_t i = 0; found != NULL && i < self->count; i++) {
        const Run *run = &self->runs[i];
        PyObject *each = Py_BuildValue("NnN", PyLong_FromVoidPtr((void *)run->begin),
                                       (Py_ssize_t)(run->end - run->begin),
                                       new_index(run->walk.at - run->begin, &run->walk,
                                                 &run->index));
        if (each == NULL || PyList_SetItem(found, i, each) < 0) Py_CLEAR(found);
    }
    return found;
}

void free_response(Response *self) {
    for (Py_ssize_t i = 0; i < self->count; i++) free(self->runs[i].index.places);
    free(self->runs);
    self->runs = NULL;
    self->count = 0;
}

PyObject *address_of(PyObject *module, PyObject *data) {
    Py_buffer bytes;
    (void)module;
    if (PyObject_GetBuffer(data, &bytes, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *found = PyLong_FromVoidPtr(bytes.buf);
    PyBuffer_Release(&bytes);
    return found;
}
