/* Records of a batch in message format 2. */

#ifndef KAFKA_MARSHAL_RECORDS_H
#define KAFKA_MARSHAL_RECORDS_H

#include "native.h"

#define APPENDED 0x08 /* attribute of a batch: its timestamps are append times */

/* Flags for fields of records. */
enum { KEYS = 1, VALUES = 2, TIMES = 4, HEADERS = 8 };

typedef struct {
    int64_t base, first_ms, max_ms, next;
    int32_t epoch, count;
    int attributes;
    const unsigned char *records, *end;
} Batch;

/* Some bytes of a record, such as its key; the size is -1 for null. */
typedef struct {
    const unsigned char *at;
    int64_t size;
} Part;

typedef struct {
    int64_t offset, time_ms, header_count;
    Part key, value;
    const unsigned char *headers; /* where the first header begins */
} Record;

/* Read a length, and skip the bytes that follow it; NOT_READ if they are missing, or
 * fewer than ``size_min``. */
static inline int read_part(Reader *in, int64_t size_min, Part *part) {
    if (!read_varint(in, &part->size) || part->size < size_min ||
        part->size > in->end - in->at)
        return NOT_READ;
    part->at = in->at;
    if (part->size > 0) in->at += part->size;
    return READ;
}

/* Read a whole record; NOT_READ if any field is malformed. */
int read_record(Reader *in, const Batch *batch, Record *record);

/* Where a record is in a fetch: its batch and itself, in bytes from the beginning. */
typedef struct {
    int32_t batch, record;
} Place;

/* A fetch, and where ``count`` of its records are. */
typedef struct {
    Py_buffer data; /* must be released */
    const unsigned char *begin, *end;
    const char *places;
    Py_ssize_t count;
} Fetch;

/* Set a fetch to these bytes and this index; -1 on an error. */
int get_fetch(PyObject *data, PyObject *places, Fetch *fetch);

/* Read a record by its number. Read the header of its batch as well, unless ``batch`` has
 * it from before. NOT_READ if there is no such record. */
int read_place(const Fetch *fetch, Py_ssize_t number, Batch *batch, Record *record);

/* Set a fetch, and check that it has records ``start`` to ``stop``; -1 on an error. */
int get_records(PyObject *data, PyObject *places, Py_ssize_t start, Py_ssize_t stop,
                Fetch *fetch);

/* Read a record of a fetch by its number; -1 on an error. */
int find_record(const Fetch *fetch, Py_ssize_t number, Batch *batch, Record *record);

/* Return the bytes, or None. */
PyObject *new_part(const Part *part);

/* Which batches are wanted, and which were taken. */
typedef struct {
    int64_t first;        /* records below this offset are not wanted */
    Py_ssize_t count_max; /* no more batches once there are this many records */
    int32_t epoch_min;    /* batches of lower leader epochs are not wanted */
    int is_checked;       /* whether to compare checksums */
    const unsigned char *at; /* behind the batches that were taken */
    int64_t next;            /* offset behind them; -1 before the first batch */
    int32_t epoch;           /* their leader epoch; -1 before the first batch */
} Walk;

typedef struct {
    Place *places; /* must be freed */
    Py_ssize_t count, room;
    int64_t base, last; /* offsets of the first record and of the last one; -1 before */
    int is_dense;       /* whether no offset may be missing in between */
    int fields;         /* KEYS and HEADERS, if some record has them */
} Index;

/* Begin at a byte, without any batch. */
void begin_index(const unsigned char *at, Walk *walk, Index *index);

/* Add the next batch if it is sound and has the leader epoch of the others; otherwise
 * return NOT_READ. Without memory return FAILED, but set no exception: this takes no
 * interpreter lock. */
int index_next(const unsigned char *begin, const unsigned char *end, Walk *walk,
               Index *index);

/* Return what ``index_records`` does; ``behind`` is the byte behind the batches. */
PyObject *new_index(Py_ssize_t behind, const Walk *walk, const Index *index);

#endif
