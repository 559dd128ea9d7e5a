/* The entries of a fetch of the coordination log: where each of them is, so that runs of
 * them can be folded as they were fetched, and ``LogEntry`` objects of some of them, equal
 * to what kafka-python makes.
 *
 * It takes sound, uncompressed batches of message format 2 and stops before any other,
 * which is left to kafka-python: that raises the errors.
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

/* --- CRC-32C, eight bytes at a time, by the processor if it can --------------------------- */

#define POLYNOMIAL 0x82F63B78u

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_CRC32C __builtin_cpu_supports("sse4.2")

__attribute__((target("sse4.2"))) static uint32_t
crc32c_by_processor(const unsigned char *at, const unsigned char *end) {
    uint64_t crc = 0xFFFFFFFFu, eight;
    for (; end - at >= 8; at += 8) {
        memcpy(&eight, at, sizeof eight);
        crc = __builtin_ia32_crc32di(crc, eight);
    }
    for (; at < end; at++) crc = __builtin_ia32_crc32qi((uint32_t)crc, *at);
    return (uint32_t)crc ^ 0xFFFFFFFFu;
}
#else
#define HAS_CRC32C 0
#define crc32c_by_processor crc32c_by_table
#endif

static uint32_t tables[8][256];

void init_entries(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
}

static uint32_t crc32c_by_table(const unsigned char *at, const unsigned char *end) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; end - at >= 8; at += 8) {
        crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
               (uint32_t)at[3] << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^
              tables[5][crc >> 16 & 255] ^ tables[4][crc >> 24] ^ tables[3][at[4]] ^
              tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
    }
    for (; at < end; at++) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return crc ^ 0xFFFFFFFFu;
}

static uint32_t crc32c(const unsigned char *at, const unsigned char *end) {
    return HAS_CRC32C ? crc32c_by_processor(at, end) : crc32c_by_table(at, end);
}

/* --- batches --------------------------------------------------------------------------- */

static uint64_t big_endian(const unsigned char *at, int size) {
    uint64_t found = 0;
    for (int i = 0; i < size; i++) found = found << 8 | at[i];
    return found;
}

/* Read the fields of a header; LEFT if its offsets are none. */
static int read_fields(const unsigned char *at, Batch *batch) {
    int32_t last_delta = (int32_t)big_endian(at + 23, 4);
    batch->base = (int64_t)big_endian(at, 8);
    if (batch->base < 0 || last_delta < 0 || batch->base > INT64_MAX - last_delta - 1)
        return LEFT;
    batch->next = batch->base + last_delta + 1;
    batch->epoch = (int32_t)big_endian(at + 12, 4);
    batch->attributes = (int)big_endian(at + 21, 2);
    batch->first_ms = (int64_t)big_endian(at + 27, 8);
    batch->max_ms = (int64_t)big_endian(at + 35, 8);
    batch->count = (int32_t)big_endian(at + 57, 4);
    batch->records = at + HEADER_BYTES;
    return READ;
}

/* Read the header of a batch; LEFT if it is not a sound one of the current format. */
static int read_header(const unsigned char *at, const unsigned char *end,
                       Batch *batch) {
    if (end - at < HEADER_BYTES) return LEFT;
    int32_t length = (int32_t)big_endian(at + 8, 4);
    if (length < HEADER_BYTES - LENGTH_BYTES || length > end - at - LENGTH_BYTES)
        return LEFT;
    if (!read_fields(at, batch) || at[16] != MAGIC || batch->attributes & COMPRESSION ||
        batch->epoch < 0 || batch->count < 0)
        return LEFT;
    batch->end = at + LENGTH_BYTES + length;
    return crc32c(at + CHECKED_FROM, batch->end) == (uint32_t)big_endian(at + 17, 4);
}

int read_place(const Fetch *fetch, Py_ssize_t number, Batch *batch, Record *record) {
    Place place;
    memcpy(&place, fetch->places + number * (Py_ssize_t)sizeof place, sizeof place);
    Py_ssize_t size = fetch->end - fetch->begin;
    if (place.batch < 0 || place.batch > size - HEADER_BYTES || place.record < 0 ||
        place.record > size)
        return LEFT;
    const unsigned char *at = fetch->begin + place.batch;
    if (batch->records != at + HEADER_BYTES && !read_fields(at, batch)) return LEFT;
    Reader in = {fetch->begin + place.record, fetch->end};
    return read_record(&in, batch, record);
}

/* --- an index -------------------------------------------------------------------------- */

typedef struct {
    Place *places;
    Py_ssize_t count, room;
    int64_t last; /* offset of the last entry; -1 before the first */
} Index;

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

/* Add the records of a batch, but for those below an offset; all of them or none. */
static int add_batch(const unsigned char *begin, const Batch *batch, int64_t first,
                     Index *index) {
    Reader in = {batch->records, batch->end};
    Py_ssize_t before = index->count;
    int64_t last = index->last;
    Record record;
    /* A record has at least seven bytes. */
    if (batch->count > (batch->end - batch->records) / 7) return LEFT;
    if (make_room(index, batch->count) != READ) return FAILED;
    for (int32_t i = 0; i < batch->count; i++) {
        Place place = {(int32_t)(batch->records - HEADER_BYTES - begin),
                       (int32_t)(in.at - begin)};
        if (!read_record(&in, batch, &record) || record.offset <= last) {
            index->count = before;
            return LEFT;
        }
        last = record.offset;
        if (last >= first) index->places[index->count++] = place;
    }
    if (in.at != in.end) {
        index->count = before;
        return LEFT;
    }
    index->last = last;
    return READ;
}

typedef struct {
    const unsigned char *at; /* behind the batches that were taken */
    int64_t next;            /* offset behind them; -1 without one */
    int32_t epoch;           /* of all of them */
} Taken;

/* Add batches of one leader epoch until there are ``count_max`` entries. */
static int index_batches(const unsigned char *begin, const unsigned char *end,
                         int64_t first, Py_ssize_t count_max, Taken *taken,
                         Index *index) {
    int result = READ;
    while (result == READ && index->count < count_max) {
        Batch batch;
        result = read_header(taken->at, end, &batch);
        if (result == READ && taken->next >= 0) {
            if (batch.epoch != taken->epoch) break;
            if (batch.base < taken->next) result = LEFT;
        }
        /* Control records are of Kafka alone; kafka-python skips them unread. */
        if (result == READ && !(batch.attributes & CONTROL))
            result = add_batch(begin, &batch, first, index);
        if (result != READ) break;
        taken->at = batch.end;
        taken->next = batch.next;
        taken->epoch = batch.epoch;
    }
    return result;
}

PyObject *index_entries(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t start, count_max;
    long long first;
    Index index = {.last = -1};
    PyObject *made = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nLn:index_entries", &data, &start, &first,
                          &count_max))
        return NULL;
    const unsigned char *begin = data.buf, *end = begin + data.len;
    int is_inside = start >= 0 && start <= data.len && data.len <= INT32_MAX;
    Taken taken = {begin + (is_inside ? start : data.len), -1, -1};
    int result;
    /* The bytes are nobody else's, so threads that fetch can run meanwhile. */
    Py_BEGIN_ALLOW_THREADS
    result = index_batches(begin, end, first, count_max, &taken, &index);
    Py_END_ALLOW_THREADS
    if (result == FAILED)
        PyErr_NoMemory();
    else
        made = Py_BuildValue("y#nLl", index.count ? (char *)index.places : "",
                             index.count * (Py_ssize_t)sizeof(Place),
                             is_inside ? (Py_ssize_t)(taken.at - begin) : start,
                             (long long)taken.next, (long)taken.epoch);
    free(index.places);
    PyBuffer_Release(&data);
    return made;
}

/* --- entries --------------------------------------------------------------------------- */

/* Set an argument of the constructor; takes the reference to the value. */
static int set_argument(PyObject *arguments, const char *name, PyObject *value) {
    int result = value == NULL ? -1 : PyDict_SetItemString(arguments, name, value);
    Py_XDECREF(value);
    return result;
}

static int add_entry(PyObject *entries, PyObject *type, PyObject *arguments,
                     const Batch *batch, const Record *record) {
    int kind = batch->attributes & APPENDED ? 1 : 0;
    if (set_argument(arguments, "leader_epoch", PyLong_FromLong(batch->epoch)) < 0 ||
        set_argument(arguments, "timestamp_type", PyLong_FromLong(kind)) < 0 ||
        set_argument(arguments, "offset", PyLong_FromLongLong(record->offset)) < 0 ||
        set_argument(arguments, "timestamp_ms", PyLong_FromLongLong(record->time_ms)) <
            0 ||
        set_argument(arguments, "value", new_part(&record->value)) < 0)
        return -1;
    PyObject *none = PyTuple_New(0);
    PyObject *entry = none == NULL ? NULL : PyObject_Call(type, none, arguments);
    int result = entry == NULL ? -1 : PyList_Append(entries, entry);
    Py_XDECREF(none);
    Py_XDECREF(entry);
    return result;
}

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

static void refuse_place(void) {
    PyErr_SetString(PyExc_ValueError, "the entries are not those of the index");
}

PyObject *read_entries(PyObject *module, PyObject *args) {
    PyObject *data, *places, *type, *entries = NULL;
    Py_ssize_t start, stop;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnnO:read_entries", &data, &places, &start, &stop,
                          &type) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    PyObject *arguments = PyDict_New();
    if (start < 0 || stop < start || stop > fetch.count)
        PyErr_SetString(PyExc_IndexError, "there are no such entries");
    else if (arguments != NULL)
        entries = PyList_New(0);
    for (Py_ssize_t at = start; entries != NULL && at < stop; at++) {
        int is_read = read_place(&fetch, at, &batch, &record);
        if (!is_read) refuse_place();
        if (!is_read || add_entry(entries, type, arguments, &batch, &record) < 0)
            Py_CLEAR(entries);
    }
    Py_XDECREF(arguments);
    PyBuffer_Release(&fetch.data);
    return entries;
}

PyObject *find_entries(PyObject *module, PyObject *args) {
    PyObject *data, *places, *found = NULL;
    const char *head;
    Py_ssize_t size;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#:find_entries", &data, &places, &head, &size) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    found = PyList_New(0);
    for (Py_ssize_t at = 0; found != NULL && at < fetch.count; at++) {
        if (!read_place(&fetch, at, &batch, &record)) {
            refuse_place();
            Py_CLEAR(found);
        } else if (record.value.size >= size &&
                   memcmp(record.value.at, head, (size_t)size) == 0) {
            PyObject *number = PyLong_FromSsize_t(at);
            if (number == NULL || PyList_Append(found, number) < 0) Py_CLEAR(found);
            Py_XDECREF(number);
        }
    }
    PyBuffer_Release(&fetch.data);
    return found;
}

PyObject *find_later(PyObject *module, PyObject *args) {
    PyObject *data, *places;
    long long time_ms;
    Fetch fetch;
    Batch batch = {0};
    Record record;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOL:find_later", &data, &places, &time_ms) ||
        get_fetch(data, places, &fetch) < 0)
        return NULL;
    Py_ssize_t at = 0;
    int is_read = READ;
    for (; at < fetch.count; at++) {
        is_read = read_place(&fetch, at, &batch, &record);
        if (!is_read || (batch.attributes & APPENDED && record.time_ms > time_ms)) break;
    }
    PyBuffer_Release(&fetch.data);
    if (is_read) return PyLong_FromSsize_t(at);
    refuse_place();
    return NULL;
}
