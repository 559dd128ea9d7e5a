/* Columns in the buffers of Arrow. */

#ifndef KAFKA_MARSHAL_COLUMNS_H
#define KAFKA_MARSHAL_COLUMNS_H

#include "records.h"

#include <string.h>

#define DATA_BYTES_MAX INT32_MAX

/* A column of bytes; without buffers it only counts. */
typedef struct {
    unsigned char *is_valid, *bytes;
    int32_t *ends;
    Py_ssize_t size, size_max, null_count;
} Column;

/* Begin to fill the buffers, which have room for the bytes that were counted. */
static inline void begin_column(Column *column, Py_ssize_t count) {
    memset(column->is_valid, 0, (size_t)(count + 7) / 8);
    column->ends[0] = 0;
    column->size_max = column->size;
    column->size = column->null_count = 0;
}

/* Count the bytes of an element, or copy them if there are buffers. */
static inline int add_part(Column *column, Py_ssize_t index, const Part *part) {
    if (part->size < 0) {
        column->null_count++;
    } else {
        if (column->bytes != NULL) {
            if (part->size > column->size_max - column->size) return NOT_READ;
            memcpy(column->bytes + column->size, part->at, (size_t)part->size);
            column->is_valid[index / 8] |= (unsigned char)(1 << index % 8);
        }
        column->size += (Py_ssize_t)part->size;
    }
    if (column->ends != NULL) column->ends[index + 1] = (int32_t)column->size;
    return READ;
}

#endif
