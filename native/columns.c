/* Decodes batches into columns in Arrow's buffers: one pass counts, one copies.
 *
 * ``to_columns`` does the same as in ``kafka_io/columns.py`` for well-formed records, and
 * returns None for anything else: Python is the rule, and raises the errors.
 */

#include "columns.h"

/* Add as NumPy does: the sum wraps around. */
static int64_t add(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

/* Buffers of a column. */
typedef struct {
    PyObject *validity, *edges, *data;
} Buffers;

static void *new_buffer(PyObject **buffer, Py_ssize_t size) {
    *buffer = PyBytes_FromStringAndSize(NULL, size);
    return *buffer == NULL ? NULL : PyBytes_AsString(*buffer);
}

/* Make the buffers of a column, for the bytes that the first pass counted. */
static int new_buffers(Buffers *buffers, Column *column, Py_ssize_t count) {
    column->is_valid = new_buffer(&buffers->validity, (count + 7) / 8);
    column->ends = new_buffer(&buffers->edges, (count + 1) * 4);
    column->bytes = new_buffer(&buffers->data, column->size);
    if (!column->is_valid || !column->ends || !column->bytes) return FAILED;
    begin_column(column, count);
    return READ;
}

static void drop_buffers(Buffers *buffers) {
    Py_CLEAR(buffers->validity);
    Py_CLEAR(buffers->edges);
    Py_CLEAR(buffers->data);
}

/* Read the bytes of a record's key or value; add them if they are wanted. */
static int read_element(Reader *in, Column *column, Py_ssize_t index, int is_wanted) {
    Part part;
    if (!read_part(in, -1, &part)) return NOT_READ;
    return is_wanted ? add_part(column, index, &part) : READ;
}

/* Return a tuple of the buffers, or None if every element is null. */
static PyObject *end_column(const Column *column, const Buffers *buffers,
                            Py_ssize_t count) {
    if (column->null_count == count) Py_RETURN_NONE;
    return Py_BuildValue("nOOO", column->null_count,
                         column->null_count ? buffers->validity : Py_None,
                         buffers->edges, buffers->data);
}

typedef struct {
    int64_t base, size, first_ms, append_ms;
    int is_appended;
    Py_buffer data;
} Whole;

typedef struct {
    PyObject *offsets, *times, *kinds;
    int64_t *offset, *time_ms;
    int32_t *kind;
    Column keys, values;
    Buffers key_buffers, value_buffers;
    Py_ssize_t count, count_max;
    int64_t first, end, last; /* wanted: [first, end); last: the offset before */
} Columns;

/* Make the buffers of all columns, for the records that the first pass counted. */
static int begin_columns(Columns *columns, Py_ssize_t count) {
    columns->offset = new_buffer(&columns->offsets, count * 8);
    columns->time_ms = new_buffer(&columns->times, count * 8);
    columns->kind = new_buffer(&columns->kinds, count * 4);
    if (!columns->offset || !columns->time_ms || !columns->kind) return FAILED;
    if (new_buffers(&columns->key_buffers, &columns->keys, count) < 0) return FAILED;
    return new_buffers(&columns->value_buffers, &columns->values, count);
}

/* Return the number of records and all buffers; NULL on an error. */
static PyObject *end_columns(const Columns *columns, Py_ssize_t count) {
    PyObject *keys = end_column(&columns->keys, &columns->key_buffers, count);
    PyObject *values = end_column(&columns->values, &columns->value_buffers, count);
    PyObject *made = NULL;
    if (keys != NULL && values != NULL)
        made = Py_BuildValue("nOOOOO", count, columns->offsets, columns->times,
                             columns->kinds, keys, values);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    return made;
}

static void drop_columns(Columns *columns) {
    Py_XDECREF(columns->offsets);
    Py_XDECREF(columns->times);
    Py_XDECREF(columns->kinds);
    drop_buffers(&columns->key_buffers);
    drop_buffers(&columns->value_buffers);
}

/* Count the wanted records of a batch, or copy them if there are buffers. */
static int read_batch(const Whole *batch, Columns *columns) {
    Reader in = {batch->data.buf, (unsigned char *)batch->data.buf + batch->data.len};
    for (int64_t i = 0; i < batch->size; i++) {
        int64_t size, delta_ms, delta;
        if (!read_varint(&in, &size) || size < 1 || size > in.end - in.at)
            return NOT_READ;
        Reader record = {in.at + 1, in.at + size}; /* skip the attributes */
        in.at += size;
        if (!read_varint(&record, &delta_ms) || !read_varint(&record, &delta))
            return NOT_READ;
        int64_t offset = add(batch->base, delta);
        if (offset < 0 || offset <= columns->last) return NOT_READ;
        columns->last = offset;
        int is_wanted = columns->first <= offset && offset < columns->end;
        Py_ssize_t at = columns->count;
        if (is_wanted && at >= columns->count_max) return NOT_READ;
        if (!read_element(&record, &columns->keys, at, is_wanted) ||
            !read_element(&record, &columns->values, at, is_wanted))
            return NOT_READ;
        if (record.at == record.end) return NOT_READ; /* no number of headers */
        if (!is_wanted) continue;
        columns->count++;
        if (columns->offset == NULL) continue;
        columns->offset[at] = offset;
        columns->time_ms[at] =
            batch->is_appended ? batch->append_ms : add(batch->first_ms, delta_ms);
        columns->kind[at] = batch->is_appended;
    }
    return in.at == in.end ? READ : NOT_READ;
}

/* Read a number of a batch; NOT_READ if it has more than 64 bits. */
static int read_number(PyObject *batch, const char *name, int64_t *found,
                       int *is_none) {
    PyObject *value = PyObject_GetAttrString(batch, name);
    if (value == NULL) return FAILED;
    if (is_none != NULL) *is_none = value == Py_None;
    int overflows = 0;
    *found = 0;
    if (is_none == NULL || !*is_none)
        *found = PyLong_AsLongLongAndOverflow(value, &overflows);
    Py_DECREF(value);
    if (overflows) return NOT_READ;
    return *found == -1 && PyErr_Occurred() ? FAILED : READ;
}

/* Open a batch; its buffer must be released if the result is READ. */
static int open_batch(PyObject *object, Whole *batch) {
    int is_created, result = read_number(object, "base", &batch->base, NULL);
    if (result == READ) result = read_number(object, "size", &batch->size, NULL);
    if (result == READ) result = read_number(object, "first_ms", &batch->first_ms, NULL);
    if (result == READ)
        result = read_number(object, "append_ms", &batch->append_ms, &is_created);
    if (result != READ) return result;
    batch->is_appended = !is_created;
    PyObject *data = PyObject_GetAttrString(object, "data");
    if (data == NULL) return FAILED;
    result = PyObject_GetBuffer(data, &batch->data, PyBUF_SIMPLE) < 0 ? FAILED : READ;
    Py_DECREF(data);
    return result;
}

static int read_batches(const Whole *batches, Py_ssize_t count, Columns *columns) {
    columns->count = 0;
    columns->last = -1;
    int result = READ;
    for (Py_ssize_t i = 0; i < count && result == READ; i++)
        result = read_batch(&batches[i], columns);
    return result;
}

static int make_columns(const Whole *batches, Py_ssize_t count, Columns *columns,
                        PyObject **made) {
    int64_t bytes = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        bytes += batches[i].data.len;
        if (batches[i].base < 0 || batches[i].size < 0) return NOT_READ;
    }
    if (bytes > DATA_BYTES_MAX) return NOT_READ;
    columns->count_max = PY_SSIZE_T_MAX;
    int result = read_batches(batches, count, columns);
    if (result != READ) return result;
    Py_ssize_t found = columns->count_max = columns->count;
    if (begin_columns(columns, found) < 0) return FAILED;
    result = read_batches(batches, count, columns);
    if (result != READ || columns->count != found) return NOT_READ;
    *made = end_columns(columns, found);
    return *made == NULL ? FAILED : READ;
}

PyObject *to_columns(PyObject *module, PyObject *args) {
    PyObject *objects, *made = NULL;
    long long first, end;
    Columns columns = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OLL:to_columns", &objects, &first, &end)) return NULL;
    Py_ssize_t count = PySequence_Size(objects), opened = 0;
    if (count < 0) return NULL;
    Whole *batches = PyMem_Calloc((size_t)count + 1, sizeof(Whole));
    if (batches == NULL) return PyErr_NoMemory();
    int result = READ;
    while (result == READ && opened < count) {
        PyObject *object = PySequence_GetItem(objects, opened);
        result = object == NULL ? FAILED : open_batch(object, &batches[opened]);
        Py_XDECREF(object);
        if (result == READ) opened++;
    }
    columns.first = first;
    columns.end = end;
    if (result == READ) result = make_columns(batches, count, &columns, &made);
    while (opened > 0) PyBuffer_Release(&batches[--opened].data);
    PyMem_Free(batches);
    drop_columns(&columns);
    if (result == FAILED) return NULL;
    if (result == READ) return made;
    Py_RETURN_NONE;
}
