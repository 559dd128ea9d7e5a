/* Records of a batch in message format 2. */

#ifndef KAFKA_MARSHAL_RECORDS_H
#define KAFKA_MARSHAL_RECORDS_H

#include "native.h"

#define APPENDED 0x08 /* of the attributes of a batch */

typedef struct {
    int64_t base, first_ms, max_ms, next;
    int32_t epoch, count;
    int attributes;
    const unsigned char *records, *end;
} Batch;

/* Bytes of a record; the size is -1 for none. */
typedef struct {
    const unsigned char *at;
    int64_t size;
} Part;

typedef struct {
    int64_t offset, time_ms, header_count;
    Part key, value;
    const unsigned char *headers; /* the first of them */
} Record;

/* Read a record whose every field is sound, to its end; LEFT for any other. */
int read_record(Reader *in, const Batch *batch, Record *record);

/* Return the bytes, or None. */
PyObject *new_part(const Part *part);

#endif
