/* The batches of a fetch: checksums, and an index of where each record begins.
 *
 * It reads sound, uncompressed batches of message format 2, and stops before any other
 * batch. Python reads those, and raises the errors.
 */

#include "records.h"

#include <stdlib.h>
#include <string.h>

#define HEADER_BYTES 61
#define LENGTH_BYTES 12 /* the base offset and the length itself */
#define CHECKED_FROM 21 /* where the attributes begin */
#define MAGIC 2
#define COMPRESSION 0x07
#define CONTROL 0x20

/* --- batches --------------------------------------------------------------------------- */

static uint64_t big_endian(const unsigned char *at, int size) {
    uint64_t found = 0;
    for (int i = 0; i < size; i++) found = found << 8 | at[i];
    return found;
}

/* Read the fields of a header; NOT_READ if its offsets are invalid. */
static int read_fields(const unsigned char *at, Batch *batch) {
    int32_t last_delta = (int32_t)big_endian(at + 23, 4);
    batch->base = (int64_t)big_endian(at, 8);
    if (batch->base < 0 || last_delta < 0 || batch->base > INT64_MAX - last_delta - 1)
        return NOT_READ;
    batch->next = batch->base + last_delta + 1;
    batch->epoch = (int32_t)big_endian(at + 12, 4);
    batch->attributes = (int)big_endian(at + 21, 2);
    batch->first_ms = (int64_t)big_endian(at + 27, 8);
    batch->max_ms = (int64_t)big_endian(at + 35, 8);
    batch->count = (int32_t)big_endian(at + 57, 4);
    batch->records = at + HEADER_BYTES;
    return READ;
}

/* Read the header of a batch; NOT_READ if it is damaged, compressed or of an old
 * format. */
static int read_header(const unsigned char *at, const unsigned char *end, int is_checked,
                       Batch *batch) {
    if (end - at < HEADER_BYTES) return NOT_READ;
    int32_t length = (int32_t)big_endian(at + 8, 4);
    if (length < HEADER_BYTES - LENGTH_BYTES || length > end - at - LENGTH_BYTES)
        return NOT_READ;
    if (!read_fields(at, batch) || at[16] != MAGIC || batch->attributes & COMPRESSION ||
        batch->count < 0)
        return NOT_READ;
    batch->end = at + LENGTH_BYTES + length;
    if (!is_checked) return READ;
    return crc32c(at + CHECKED_FROM, batch->end) == (uint32_t)big_endian(at + 17, 4);
}

int read_place(const Fetch *fetch, Py_ssize_t number, Batch *batch, Record *record) {
    Place place;
    memcpy(&place, fetch->places + number * (Py_ssize_t)sizeof place, sizeof place);
    Py_ssize_t size = fetch->end - fetch->begin;
    if (place.batch < 0 || place.batch > size - HEADER_BYTES || place.record < 0 ||
        place.record > size)
        return NOT_READ;
    const unsigned char *at = fetch->begin + place.batch;
    if (batch->records != at + HEADER_BYTES && !read_fields(at, batch)) return NOT_READ;
    Reader in = {fetch->begin + place.record, fetch->end};
    return read_record(&in, batch, record);
}

/* --- an index -------------------------------------------------------------------------- */

/* Make room for more places; FAILED without memory, and without an exception. */
static int make_room(Index *index, Py_ssize_t more) {
    if (index->room - index->count >= more) return READ;
    size_t room = 2 * (size_t)index->count + (size_t)more;
    Place *places = realloc(index->places, room * sizeof(Place));
    if (places == NULL) return FAILED;
    index->places = places;
    index->room = (Py_ssize_t)room;
    return READ;
}

/* Add the records of a batch from offset ``first`` on: all of them, or none and
 * NOT_READ. */
static int add_batch(const unsigned char *begin, const Batch *batch, int64_t first,
                     Index *index) {
    Reader in = {batch->records, batch->end};
    Py_ssize_t before = index->count;
    int64_t last = index->last;
    Record record;
    /* A record has at least seven bytes. */
    if (batch->count > (batch->end - batch->records) / 7) return NOT_READ;
    if (make_room(index, batch->count) != READ) return FAILED;
    for (int32_t i = 0; i < batch->count; i++) {
        Place place = {(int32_t)(batch->records - HEADER_BYTES - begin),
                       (int32_t)(in.at - begin)};
        if (!read_record(&in, batch, &record) || record.offset <= last ||
            (index->is_dense && last >= 0 && record.offset != last + 1)) {
            index->count = before;
            return NOT_READ;
        }
        last = record.offset;
        if (last < first) continue;
        if (index->count == 0) index->base = last;
        index->places[index->count++] = place;
        if (record.key.size >= 0) index->fields |= KEYS;
        if (record.header_count > 0) index->fields |= HEADERS;
    }
    if (in.at != in.end) {
        index->count = before;
        return NOT_READ;
    }
    index->last = last;
    return READ;
}

void begin_index(const unsigned char *at, Walk *walk, Index *index) {
    index->base = index->last = walk->next = walk->epoch = -1;
    walk->at = at;
}

int index_next(const unsigned char *begin, const unsigned char *end, Walk *walk,
               Index *index) {
    Batch batch;
    int result = read_header(walk->at, end, walk->is_checked, &batch);
    if (result != READ || batch.epoch < walk->epoch_min) return NOT_READ;
    if (walk->next >= 0 && (batch.epoch != walk->epoch || batch.base < walk->next))
        return NOT_READ;
    /* Skip control records, which are Kafka's own. */
    if (!(batch.attributes & CONTROL))
        result = add_batch(begin, &batch, walk->first, index);
    if (result != READ) return result;
    walk->at = batch.end;
    walk->next = batch.next;
    walk->epoch = batch.epoch;
    return READ;
}

/* Add batches until there are enough records; FAILED without memory. */
static int index_batches(const unsigned char *begin, const unsigned char *end, Walk *walk,
                         Index *index) {
    int result = READ;
    while (result == READ && index->count < walk->count_max)
        result = index_next(begin, end, walk, index);
    return result;
}

/* Index batches from byte ``start`` on, and move it behind them; FAILED on an error. */
static int index_from(const Py_buffer *data, Py_ssize_t *start, Walk *walk,
                      Index *index) {
    const unsigned char *begin = data->buf, *end = begin + data->len;
    int result;
    begin_index(begin, walk, index);
    if (*start < 0 || *start > data->len || data->len > INT32_MAX) return NOT_READ;
    walk->at += *start;
    /* Nobody changes the bytes, so other threads, such as those that fetch, can run. */
    Py_BEGIN_ALLOW_THREADS
    result = index_batches(begin, end, walk, index);
    Py_END_ALLOW_THREADS
    *start = walk->at - begin;
    if (result == FAILED) PyErr_NoMemory();
    return result;
}

/* Return the places of an index as bytes. */
static PyObject *new_places(const Index *index) {
    return PyBytes_FromStringAndSize((const char *)index->places,
                                     index->count * (Py_ssize_t)sizeof(Place));
}

PyObject *new_index(Py_ssize_t behind, const Walk *walk, const Index *index) {
    return Py_BuildValue("NinLLl", new_places(index), index->fields, behind,
                         (long long)index->base, (long long)walk->next,
                         (long)walk->epoch);
}

PyObject *index_entries(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t start;
    Walk walk = {.is_checked = 1};
    Index index = {0};
    PyObject *made = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nLn:index_entries", &data, &start, &walk.first,
                          &walk.count_max))
        return NULL;
    if (index_from(&data, &start, &walk, &index) != FAILED)
        made = Py_BuildValue("NnLl", new_places(&index), start, (long long)walk.next,
                             (long)walk.epoch);
    free(index.places);
    PyBuffer_Release(&data);
    return made;
}

PyObject *index_records(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t start;
    Walk walk = {.count_max = PY_SSIZE_T_MAX, .epoch_min = INT32_MIN};
    Index index = {.is_dense = 1};
    PyObject *made = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nLp:index_records", &data, &start, &walk.first,
                          &walk.is_checked))
        return NULL;
    if (index_from(&data, &start, &walk, &index) != FAILED)
        made = new_index(start, &walk, &index);
    free(index.places);
    PyBuffer_Release(&data);
    return made;
}

/* --- a fetch with its index ------------------------------------------------------------ */

int get_fetch(PyObject *data, PyObject *places, Fetch *fetch) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(places, &bytes, &size) < 0 ||
        PyObject_GetBuffer(data, &fetch->data, PyBUF_SIMPLE) < 0)
        return -1;
    fetch->begin = fetch->data.buf;
    fetch->end = fetch->begin + fetch->data.len;
    fetch->places = bytes;
    fetch->count = size / (Py_ssize_t)sizeof(Place);
    return 0;
}
