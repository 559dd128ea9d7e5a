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

/* Fields of records, to be combined. */
enum { KEYS = 1, VALUES = 2, TIMES = 4, HEADERS = 8 };

/* --- an index -------------------------------------------------------------------------- */

/* Fill in where each record begins; LEFT unless all are sound and no offset is missing. */
static int fill_index(const Batch *batch, int32_t *starts, int *fields) {
    Reader in = {batch->records, batch->end};
    Record record;
    for (int32_t i = 0; i < batch->count; i++) {
        starts[i] = (int32_t)(in.at - batch->records);
        if (!read_record(&in, batch, &record) || record.offset != batch->base + i)
            return LEFT;
        if (record.key.size >= 0) *fields |= KEYS;
        if (record.header_count > 0) *fields |= HEADERS;
    }
    return in.at == in.end ? READ : LEFT;
}

PyObject *index_records(PyObject *module, PyObject *args) {
    Py_buffer data;
    Batch batch = {0};
    PyObject *index = NULL;
    int fields = VALUES | TIMES, result = LEFT;
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
                            &fields);
    PyBuffer_Release(&data);
    PyObject *made = NULL;
    if (result == READ) made = Py_BuildValue("Oi", index, fields);
    Py_XDECREF(index);
    if (result != LEFT) return made;
    Py_RETURN_NONE;
}

/* --- columns --------------------------------------------------------------------------- */

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

/* Set an element of a column, which takes the reference. */
static int set_field(PyObject *column, Py_ssize_t at, PyObject *made) {
    return made == NULL ? -1 : PyList_SetItem(column, at, made);
}

typedef struct {
    PyObject *keys, *values, *times, *headers; /* NULL: not wanted */
} Columns;

static int add_record(const Columns *columns, Py_ssize_t at, const Record *record,
                      const unsigned char *end) {
    if (columns->keys && set_field(columns->keys, at, new_part(&record->key)) < 0)
        return -1;
    if (columns->values && set_field(columns->values, at, new_part(&record->value)) < 0)
        return -1;
    if (columns->times &&
        set_field(columns->times, at, PyLong_FromLongLong(record->time_ms)) < 0)
        return -1;
    if (columns->headers &&
        set_field(columns->headers, at, new_headers(record, end)) < 0)
        return -1;
    return 0;
}

/* Make an empty column; NULL without an error if it is not wanted. */
static PyObject *new_column(int is_wanted, Py_ssize_t size) {
    return is_wanted && !PyErr_Occurred() ? PyList_New(size) : NULL;
}

/* Read a record by its number; -1 on an error. */
static int find_record(const Py_buffer *data, const Py_buffer *index, const Batch *batch,
                       Py_ssize_t number, Record *record) {
    const unsigned char *begin = data->buf, *end = begin + data->len;
    int32_t at;
    memcpy(&at, (const char *)index->buf + number * 4, 4);
    Reader in = {begin + (at < 0 || at > data->len ? data->len : at), end};
    if (read_record(&in, batch, record)) return 0;
    PyErr_SetString(PyExc_ValueError, "the records are not those of the index");
    return -1;
}

/* Fill the columns with records ``start`` to ``stop``; -1 on an error. */
static int fill_columns(const Columns *columns, const Py_buffer *data,
                        const Py_buffer *index, const Batch *batch, Py_ssize_t start,
                        Py_ssize_t stop) {
    const unsigned char *end = (const unsigned char *)data->buf + data->len;
    for (Py_ssize_t i = start; i < stop; i++) {
        Record record;
        if (find_record(data, index, batch, i, &record) < 0) return -1;
        if (add_record(columns, i - start, &record, end) < 0) return -1;
    }
    return 0;
}

static PyObject *column_or_none(PyObject *column) {
    return column == NULL ? Py_NewRef(Py_None) : column;
}

PyObject *read_columns(PyObject *module, PyObject *args) {
    Py_buffer data, index;
    Py_ssize_t start, stop;
    Batch batch = {0};
    int fields, result = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*nniL:read_columns", &data, &index, &start, &stop,
                          &fields, &batch.first_ms))
        return NULL;
    batch.next = index.len / 4;
    Columns columns = {0};
    if (0 <= start && start <= stop && stop <= batch.next) {
        Py_ssize_t size = stop - start;
        columns.keys = new_column(fields & KEYS, size);
        columns.values = new_column(fields & VALUES, size);
        columns.times = new_column(fields & TIMES, size);
        columns.headers = new_column(fields & HEADERS, size);
        if (!PyErr_Occurred())
            result = fill_columns(&columns, &data, &index, &batch, start, stop);
    } else {
        PyErr_SetString(PyExc_IndexError, "the batch has no such records");
    }
    PyBuffer_Release(&index);
    PyBuffer_Release(&data);
    if (result == 0)
        return Py_BuildValue("NNNN", column_or_none(columns.keys),
                             column_or_none(columns.values),
                             column_or_none(columns.times),
                             column_or_none(columns.headers));
    Py_XDECREF(columns.keys);
    Py_XDECREF(columns.values);
    Py_XDECREF(columns.times);
    Py_XDECREF(columns.headers);
    return NULL;
}

/* --- records --------------------------------------------------------------------------- */

/* Arguments of a record, in the order of ``ParsedRecord``. */
enum { OFFSET, VALUE, TOKEN, KEY, TIME, KIND, PAIRS, ORIGIN };

/* Set an argument, which takes the reference; -1 on an error. */
static int set_argument(PyObject *arguments, Py_ssize_t at, PyObject *made) {
    return made == NULL ? -1 : PyTuple_SetItem(arguments, at, made);
}

/* Return the arguments of all records, with what they have in common. */
static PyObject *new_arguments(PyObject *token, PyObject *append_ms, PyObject *origin) {
    return Py_BuildValue("OOOOOiNO", Py_None, Py_None, token, Py_None, append_ms,
                         append_ms != Py_None, PyTuple_New(0), origin);
}

/* Make a record. The arguments are used again: a call leaves no reference to them. */
static PyObject *new_record(PyObject *type, PyObject *arguments, const Record *record,
                            int fields, const unsigned char *end) {
    if (set_argument(arguments, OFFSET, PyLong_FromLongLong(record->offset)) < 0 ||
        set_argument(arguments, VALUE, new_part(&record->value)) < 0)
        return NULL;
    if (fields & KEYS && set_argument(arguments, KEY, new_part(&record->key)) < 0)
        return NULL;
    if (fields & TIMES &&
        set_argument(arguments, TIME, PyLong_FromLongLong(record->time_ms)) < 0)
        return NULL;
    if (fields & HEADERS &&
        set_argument(arguments, PAIRS, new_headers(record, end)) < 0)
        return NULL;
    return PyObject_Call(type, arguments, NULL);
}

/* Return a list of records ``start`` to ``stop``. */
static PyObject *new_records(PyObject *type, PyObject *arguments, const Py_buffer *data,
                             const Py_buffer *index, const Batch *batch, int fields,
                             Py_ssize_t start, Py_ssize_t stop) {
    const unsigned char *end = (const unsigned char *)data->buf + data->len;
    PyObject *made = arguments == NULL ? NULL : PyList_New(stop - start);
    for (Py_ssize_t i = start; made != NULL && i < stop; i++) {
        Record record;
        PyObject *each = NULL;
        if (find_record(data, index, batch, i, &record) == 0)
            each = new_record(type, arguments, &record, fields, end);
        if (each == NULL || PyList_SetItem(made, i - start, each) < 0) Py_CLEAR(made);
    }
    return made;
}

PyObject *make_records(PyObject *module, PyObject *args) {
    Py_buffer data, index;
    Py_ssize_t start, stop;
    Batch batch = {0};
    PyObject *type, *token, *append_ms, *origin, *made = NULL;
    int fields;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*y*nniLLOOO:make_records", &type, &data, &index,
                          &start, &stop, &fields, &batch.base, &batch.first_ms, &token,
                          &append_ms, &origin))
        return NULL;
    Py_ssize_t count = index.len / 4;
    if (0 <= start && start <= stop && stop <= count && batch.base >= 0 &&
        batch.base <= INT64_MAX - count) {
        batch.next = batch.base + count;
        PyObject *arguments = new_arguments(token, append_ms, origin);
        made = new_records(type, arguments, &data, &index, &batch, fields, start, stop);
        Py_XDECREF(arguments);
    } else {
        PyErr_SetString(PyExc_IndexError, "the batch has no such records");
    }
    PyBuffer_Release(&index);
    PyBuffer_Release(&data);
    return made;
}
