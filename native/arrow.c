/* Exports records that ``batches.c`` has found as a record batch, by the C data interface
 * of Arrow (https://arrow.apache.org/docs/format/CDataInterface.html).
 *
 * One block of memory has the structures and all buffers.
 */

#include "columns.h"

#include <stdatomic.h>
#include <stdlib.h>

#define ALIGNMENT 64 /* as Arrow recommends */
#define NAME "arrow_array"

/* As the interface defines it. */
typedef struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
} ArrowArray;

/* In the order of ``kafka_io/arrow.py``. */
enum { OFFSETS, TIMESTAMPS, KEY_BYTES, VALUE_BYTES, COLUMN_COUNT };

/* ``users`` counts the capsule, and each array that was not released. */
typedef struct {
    atomic_int users;
    ArrowArray whole, columns[COLUMN_COUNT], *children[COLUMN_COUNT];
    const void *buffers[COLUMN_COUNT][3], *no_buffer;
} Block;

typedef struct {
    int64_t *offset, *time_ms;
    Column keys, values;
    Py_ssize_t count;
} Filled;

/* --- the block ------------------------------------------------------------------------- */

/* Any thread may release an array, with the interpreter lock or without. */
static void drop_block(Block *block) {
    if (atomic_fetch_sub(&block->users, 1) == 1) free(block);
}

static void release_array(ArrowArray *array) {
    Block *block = array->private_data;
    for (int64_t i = 0; i < array->n_children; i++)
        if (array->children[i]->release != NULL)
            array->children[i]->release(array->children[i]);
    array->release = NULL;
    drop_block(block);
}

static void drop_capsule(PyObject *capsule) {
    Block *block = PyCapsule_GetPointer(capsule, NAME);
    if (block->whole.release != NULL) block->whole.release(&block->whole);
    drop_block(block);
}

static ArrowArray new_array(Block *block, const void **buffers, int64_t buffer_count,
                            int64_t length, int64_t null_count) {
    atomic_fetch_add(&block->users, 1);
    return (ArrowArray){
        .length = length,
        .null_count = null_count,
        .n_buffers = buffer_count,
        .buffers = buffers,
        .release = release_array,
        .private_data = block,
    };
}

static void add_column(Block *block, int index, const void *validity, const void *first,
                       const void *second, Py_ssize_t count, Py_ssize_t null_count) {
    const void **buffers = block->buffers[index];
    buffers[0] = null_count > 0 ? validity : NULL;
    buffers[1] = first;
    buffers[2] = second;
    block->columns[index] =
        new_array(block, buffers, second == NULL ? 2 : 3, count, null_count);
    block->children[index] = &block->columns[index];
}

/* Fill the structures. */
static void describe(Block *block, const Filled *filled) {
    const Column *keys = &filled->keys, *values = &filled->values;
    Py_ssize_t count = filled->count;
    add_column(block, OFFSETS, NULL, filled->offset, NULL, count, 0);
    add_column(block, TIMESTAMPS, NULL, filled->time_ms, NULL, count, 0);
    add_column(block, KEY_BYTES, keys->is_valid, keys->ends, keys->bytes, count,
               keys->null_count);
    add_column(block, VALUE_BYTES, values->is_valid, values->ends, values->bytes, count,
               values->null_count);
    block->whole = new_array(block, &block->no_buffer, 1, count, 0);
    block->whole.n_children = COLUMN_COUNT;
    block->whole.children = block->children;
}

/* Take bytes from a block, or only count them if there is no block yet. */
static void *take(unsigned char *block, size_t *used, Py_ssize_t size) {
    size_t at = *used;
    *used = (at + (size_t)size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return block == NULL ? NULL : block + at;
}

static void take_column(unsigned char *block, size_t *used, Column *column,
                        Py_ssize_t count) {
    column->is_valid = take(block, used, (count + 7) / 8);
    column->ends = take(block, used, (count + 1) * 4);
    column->bytes = take(block, used, column->size + 1); /* its pointer is not null */
}

/* Take the buffers from a block, if there is one; return how many bytes they take. */
static size_t take_buffers(unsigned char *block, Filled *filled) {
    size_t used = 0;
    filled->offset = take(block, &used, filled->count * 8);
    filled->time_ms = take(block, &used, filled->count * 8);
    take_column(block, &used, &filled->keys, filled->count);
    take_column(block, &used, &filled->values, filled->count);
    return used;
}

/* Make a block with buffers for the counted records; NULL without memory. */
static Block *new_block(Filled *filled) {
    size_t size = take_buffers(NULL, filled);
    Block *block = malloc(sizeof(Block) + ALIGNMENT + size);
    if (block == NULL) return NULL;
    memset(block, 0, sizeof(Block));
    atomic_init(&block->users, 1);
    uintptr_t end = (uintptr_t)(block + 1);
    take_buffers((unsigned char *)((end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT),
                 filled);
    begin_column(&filled->keys, filled->count);
    begin_column(&filled->values, filled->count);
    return block;
}

/* --- records of a fetch ---------------------------------------------------------------- */

/* Some records of a fetch; its data must be released. */
typedef struct {
    Fetch fetch;
    Py_ssize_t start, stop;
    int fields;
} Piece;

/* Read a piece from its tuple; -1 on an error. */
static int get_piece(PyObject *argument, Piece *piece) {
    PyObject *data, *places;
    if (!PyArg_ParseTuple(argument, "OOnni:export_records", &data, &places,
                          &piece->start, &piece->stop, &piece->fields))
        return -1;
    return get_records(data, places, piece->start, piece->stop, &piece->fetch);
}

/* Count the most that a piece can take: its keys and values lie between the first key and
 * the end of the last value. */
static int add_room(const Piece *piece, Filled *filled) {
    Batch batch = {0};
    Record first, last;
    if (piece->start == piece->stop) return READ;
    if (find_record(&piece->fetch, piece->start, &batch, &first) < 0 ||
        find_record(&piece->fetch, piece->stop - 1, &batch, &last) < 0)
        return FAILED;
    Py_ssize_t most = last.headers - first.key.at;
    if (most < 0 || filled->values.size > DATA_BYTES_MAX - most) return NOT_READ;
    filled->count += piece->stop - piece->start;
    filled->values.size += most;
    if (piece->fields & KEYS) filled->keys.size += most;
    return READ;
}

/* Copy the records of a piece into the buffers. */
static int copy_piece(const Piece *piece, Filled *filled) {
    Batch batch = {0};
    Record record;
    for (Py_ssize_t i = piece->start; i < piece->stop; i++) {
        Py_ssize_t at = filled->count++;
        if (find_record(&piece->fetch, i, &batch, &record) < 0) return FAILED;
        if (!add_part(&filled->keys, at, &record.key) ||
            !add_part(&filled->values, at, &record.value))
            return NOT_READ;
        filled->offset[at] = record.offset;
        filled->time_ms[at] = record.time_ms;
    }
    return READ;
}

/* Call ``add_room`` or ``copy_piece`` for every piece. */
static int each_piece(PyObject *pieces, Filled *filled,
                      int (*work)(const Piece *, Filled *)) {
    int result = READ;
    filled->count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(pieces) && result == READ; i++) {
        Piece piece;
        if (get_piece(PyTuple_GetItem(pieces, i), &piece) < 0) return FAILED;
        result = work(&piece, filled);
        PyBuffer_Release(&piece.fetch.data);
    }
    return result;
}

/* Return the address of the record batch, and a capsule that keeps it. */
static PyObject *new_export(Block *block) {
    PyObject *capsule = PyCapsule_New(block, NAME, drop_capsule);
    if (capsule == NULL) {
        release_array(&block->whole);
        drop_block(block);
        return NULL;
    }
    return Py_BuildValue("NN", PyLong_FromVoidPtr(&block->whole), capsule);
}

PyObject *export_records(PyObject *module, PyObject *args) {
    Filled filled = {0};
    (void)module;
    int result = each_piece(args, &filled, add_room);
    if (result == FAILED) return NULL;
    if (result == NOT_READ) Py_RETURN_NONE; /* more bytes than a column can have */
    Block *block = new_block(&filled);
    if (block == NULL) return PyErr_NoMemory();
    result = each_piece(args, &filled, copy_piece);
    if (result == READ) {
        describe(block, &filled);
        return new_export(block);
    }
    drop_block(block);
    if (result == FAILED) return NULL;
    Py_RETURN_NONE;
}
