/* Records of ``kafka_io/packed_records.py``: where each of them is in a batch, and single
 * fields of some of them.
 *
 * Only batches in which every record is sound and no offset is missing get an index. All
 * others are left to Python.
 */

#include "records.h"

#include <string.h>

/* Skip bytes with a length; LEFT if they are missing, or too short. */
static int read_part(Reader *in, int64_t size_min, Part *part) {
    if (!read_varint(in, &part->size) || part->size < size_min ||
        part->size > in->end - in->at)
        return LEFT;
    part->at = in->at;
    if (part->size > 0) in->at += part->size;
    return READ;
}

int read_record(Reader *in, const Batch *batch, Record *record) {
    int64_t size, delta_ms, delta;
    if (!read_varint(in, &size) || size < 1 || size > in->end - in->at) return LEFT;
    Reader body = {in->at, in->at + size};
    in->at += size;
    if (*body.at++ > 127) return LEFT; /* attributes, which nobody sets */
    if (!read_varint(&body, &delta_ms) || !read_varint(&body, &delta) || delta < 0 ||
        delta >= batch->next - batch->base)
        return LEFT;
    record->offset = batch->base + delta;
    if (batch->attributes & APPENDED)
        record->time_ms = batch->max_ms;
    else if (__builtin_add_overflow(batch->first_ms, delta_ms, &record->time_ms))
        return LEFT;
    if (!read_part(&body, -1, &record->key) || !read_part(&body, -1, &record->value) ||
        !read_varint(&body, &record->header_count) || record->header_count < 0)
        return LEFT;
    record->headers = body.at;
    Part ignored;
    for (int64_t left = record->header_count; left > 0; left--)
        if (!read_part(&body, 0, &ignored) || !read_part(&body, -1, &ignored))
            return LEFT;
    return body.at == body.end ? READ : LEFT;
}

PyObject *new_part(const Part *part) {
    if (part->size < 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)part->at, (Py_ssize_t)part->size);
}

/* --- an index -------------------------------------------------------------------------- */

/* Fill in where each record begins; LEFT unless all are sound and no offset is missing. */
static int fill_index(const Batch *batch, int32_t *starts, int *has_headers) {
    Reader in = {batch->records, batch->end};
    Record record;
    for (int32_t i = 0; i < batch->count; i++) {
        starts[i] = (int32_t)(in.at - batch->records);
        if (!read_record(&in, batch, &record) || record.offset != batch->base + i)
            return LEFT;
        if (record.header_count > 0) *has_headers = 1;
    }
    return in.at == in.end ? READ : LEFT;
}

PyObject *index_records(PyObject *module, PyObject *args) {
    Py_buffer data;
    Batch batch = {0};
    PyObject *index = NULL;
    int has_headers = 0, result = LEFT;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*iL:index_records", &data, &batch.count,
                          &batch.first_ms))
        return NULL;
    batch.next = batch.count; /* offsets count from that of the batch */
    batch.records = data.buf;
    batch.end = batch.records + data.len;
    /* A record has at least seven bytes. */
    if (batch.count > 0 && batch.count <= data.len / 7 && data.len <= INT32_MAX) {
        index = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch.count * 4);
        result = index == NULL ? FAILED : READ;
    }
    if (result == READ)
        result = fill_index(&batch, (int32_t *)(void *)PyBytes_AsString(index),
                            &has_headers);
    PyBuffer_Release(&data);
    PyObject *made = NULL;
    if (result == READ) made = Py_BuildValue("Oi", index, has_headers);
    Py_XDECREF(index);
    if (result != LEFT) return made;
    Py_RETURN_NONE;
}

/* --- columns --------------------------------------------------------------------------- */

enum { KEYS, VALUES, TIMES, HEADERS };

/* Return pairs of name and value; U+FFFD replaces bytes of a name that are no text. */
static PyObject *new_headers(const Record *record, const unsigned char *end) {
    PyObject *found = PyTuple_New((Py_ssize_t)record->header_count);
    Reader in = {record->headers, end};
    for (Py_ssize_t i = 0; found != NULL && i < record->header_count; i++) {
        Part name, value;
        PyObject *pair = NULL;
        if (read_part(&in, 0, &name) && read_part(&in, -1, &value))
            pair = Py_BuildValue(
                "NN",
                PyUnicode_DecodeUTF8((const char *)name.at, (Py_ssize_t)name.size,
                                     "replace"),
                new_part(&value));
        if (pair == NULL || PyTuple_SetItem(found, i, pair) < 0) Py_CLEAR(found);
    }
    return found;
}

static PyObject *new_field(const Record *record, int field, const unsigned char *end) {
    switch (field) {
    case KEYS: return new_part(&record->key);
    case VALUES: return new_part(&record->value);
    case TIMES: return PyLong_FromLongLong(record->time_ms);
    default: return new_headers(record, end);
    }
}

PyObject *read_column(PyObject *module, PyObject *args) {
    Py_buffer data, index;
    Py_ssize_t start, stop;
    Batch batch = {0};
    int field;
    PyObject *column = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*nniL:read_column", &data, &index, &start, &stop,
                          &field, &batch.first_ms))
        return NULL;
    const unsigned char *begin = data.buf, *end = begin + data.len;
    batch.next = index.len / 4;
    if (0 <= start && start <= stop && stop <= batch.next && KEYS <= field &&
        field <= HEADERS)
        column = PyList_New(stop - start);
    else
        PyErr_SetString(PyExc_IndexError, "no such records, or no such field");
    for (Py_ssize_t i = start; column != NULL && i < stop; i++) {
        int32_t at;
        Record record;
        memcpy(&at, (const char *)index.buf + i * 4, 4);
        Reader in = {begin + (at < 0 || at > data.len ? data.len : at), end};
        PyObject *made = NULL;
        if (read_record(&in, &batch, &record))
            made = new_field(&record, field, end);
        else
            PyErr_SetString(PyExc_ValueError, "the records are not those of the index");
        if (made == NULL || PyList_SetItem(column, i - start, made) < 0)
            Py_CLEAR(column);
    }
    PyBuffer_Release(&index);
    PyBuffer_Release(&data);
    return column;
}
