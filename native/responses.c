/* Fetch responses, in which ``kafka_io/responses.py`` finds the records as well.
 *
 * Their batches are checked and indexed while the application does something else.
 */

#include "responses.h"

#include <stdlib.h>

/* Versions of Fetch in which fields appear, and those that are understood. */
enum { FIRST = 4, LOG_START = 5, SESSION = 7, REPLICA = 11, FLEXIBLE = 12, TOPIC_ID = 13 };
#define LATEST TOPIC_ID
#define UUID_BYTES 16
#define ABORTED_BYTES 16 /* of an aborted transaction, without its tags */
#define RUNS_MAX 100000

/* What is read next. */
enum { HEAD, TOPIC, PARTITION, RECORDS, PARTITION_TAGS, TOPIC_TAGS, END };

/* --- fields; each is LEFT if it is not there --------------------------------------- */

static int skip(Reader *in, int64_t size) {
    if (size < 0 || size > in->end - in->at) return LEFT;
    in->at += size;
    return READ;
}

static int read_unsigned(Reader *in, int64_t *found) {
    *found = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (in->at >= in->end) return LEFT;
        unsigned char byte = *in->at++;
        *found |= (int64_t)(byte & 127) << shift;
        if (byte < 128) return READ;
    }
    return LEFT;
}

/* Read a length or a number of elements, of some bytes in ordinary versions; -1 for null. */
static int read_size(Reader *in, int version, int bytes, int64_t *found) {
    if (version >= FLEXIBLE) {
        int result = read_unsigned(in, found);
        *found -= 1;
        return result;
    }
    if (in->end - in->at < bytes) return LEFT;
    uint32_t number = 0;
    for (int i = 0; i < bytes; i++) number = number << 8 | *in->at++;
    *found = bytes == 2 ? (int16_t)number : (int32_t)number;
    return READ;
}

static int skip_tags(Reader *in, int version) {
    int64_t count, size;
    if (version < FLEXIBLE) return READ;
    if (!read_unsigned(in, &count)) return LEFT;
    while (count-- > 0)
        if (!read_unsigned(in, &size) || !read_unsigned(in, &size) || !skip(in, size))
            return LEFT;
    return READ;
}

static int read_head(Reader *in, Response *self) {
    return skip(in, 4) && skip_tags(in, self->version) &&
           skip(in, self->version >= SESSION ? 10 : 4) &&
           read_size(in, self->version, 4, &self->topics);
}

static int read_topic(Reader *in, Response *self) {
    int64_t size = UUID_BYTES;
    return (self->version >= TOPIC_ID || read_size(in, self->version, 2, &size)) &&
           skip(in, size) && read_size(in, self->version, 4, &self->partitions);
}

/* Read what comes before the records of a partition, and their size. */
static int read_partition(Reader *in, int version, int64_t *size) {
    int64_t aborted;
    /* Index, error, high watermark, last stable offset, log start. */
    if (!skip(in, version >= LOG_START ? 30 : 22) || !read_size(in, version, 4, &aborted))
        return LEFT;
    while (aborted-- > 0)
        if (!skip(in, ABORTED_BYTES) || !skip_tags(in, version)) return LEFT;
    return (version < REPLICA || skip(in, 4)) && read_size(in, version, 4, size);
}

/* --- steps ----------------------------------------------------------------------------- */

static int begin_run(Response *self, const unsigned char *begin, int64_t size) {
    if (size > self->end - begin || self->count == RUNS_MAX) return LEFT;
    /* Room is doubled when it is full. */
    if ((self->count & (self->count - 1)) == 0) {
        size_t room = self->count ? 2 * (size_t)self->count : 1;
        Run *runs = realloc(self->runs, room * sizeof(Run));
        if (runs == NULL) return LEFT;
        self->runs = runs;
    }
    Run made = {
        .begin = begin,
        .end = begin + size,
        .walk = {.count_max = PY_SSIZE_T_MAX, .epoch_min = INT32_MIN, .is_checked = 1},
        .index = {.is_dense = 1},
    };
    begin_index(begin, &made.walk, &made.index);
    self->runs[self->count++] = made;
    return READ;
}

/* Index the batches of a partition; LEFT if it was stopped before the end. */
static int read_run(Run *self, const atomic_int *is_stopped) {
    int result = READ;
    while (result == READ && !atomic_load(is_stopped))
        result = index_next(self->begin, self->end, &self->walk, &self->index);
    return result != READ;
}

/* Read what is next; LEFT if there is nothing, or it was stopped. */
static int read_step(Response *self, const atomic_int *is_stopped) {
    Reader in = {self->at, self->end};
    int result = LEFT, next = self->step;
    int64_t size = 0;
    switch (self->step) {
    case HEAD:
        result = read_head(&in, self);
        next = TOPIC;
        break;
    case TOPIC:
        next = self->topics > 0 ? PARTITION : END;
        result = next == END || read_topic(&in, self);
        if (result) self->topics--;
        break;
    case PARTITION:
        if (self->partitions <= 0) {
            result = READ;
            next = TOPIC_TAGS;
            break;
        }
        result = read_partition(&in, self->version, &size);
        if (result && size > 0) result = begin_run(self, in.at, size);
        if (result) self->partitions--;
        next = size > 0 ? RECORDS : PARTITION_TAGS;
        break;
    case RECORDS:
        result = read_run(&self->runs[self->count - 1], is_stopped);
        in.at = self->runs[self->count - 1].end;
        next = PARTITION_TAGS;
        break;
    case PARTITION_TAGS:
    case TOPIC_TAGS:
        result = skip_tags(&in, self->version);
        next = self->step == TOPIC_TAGS ? TOPIC : PARTITION;
        break;
    default:
        break;
    }
    if (!result) return LEFT;
    self->at = in.at;
    self->step = next;
    return READ;
}

void begin_response(Response *self, const unsigned char *begin, const unsigned char *end,
                    int version) {
    int is_known = FIRST <= version && version <= LATEST;
    *self = (Response){.version = version,
                       .step = is_known ? HEAD : END,
                       .at = begin,
                       .end = end};
}

void read_response(Response *self, const atomic_int *is_stopped) {
    while (read_step(self, is_stopped)) continue;
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
