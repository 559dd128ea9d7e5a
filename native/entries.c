/* The records of a fetch as ``LogEntry`` objects: what kafka-python makes of them, for the
 * coordination log.
 *
 * It reads sound, uncompressed batches of message format 2 and stops before any other,
 * which is left to kafka-python: that raises the errors.
 */

#include "records.h"

#define HEADER_BYTES 61
#define LENGTH_BYTES 12 /* the base offset and the length itself */
#define CHECKED_FROM 21 /* where the attributes begin */
#define MAGIC 2
#define COMPRESSION 0x07
#define CONTROL 0x20

/* --- CRC-32C, eight bytes at a time ---------------------------------------------------- */

#define POLYNOMIAL 0x82F63B78u

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

static uint32_t crc32c(const unsigned char *at, const unsigned char *end) {
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

/* --- batches --------------------------------------------------------------------------- */

static uint64_t big_endian(const unsigned char *at, int size) {
    uint64_t found = 0;
    for (int i = 0; i < size; i++) found = found << 8 | at[i];
    return found;
}

/* Read the header of a batch; LEFT if it is not a sound one of the current format. */
static int read_header(const unsigned char *at, const unsigned char *end,
                       Batch *batch) {
    if (end - at < HEADER_BYTES) return LEFT;
    int32_t length = (int32_t)big_endian(at + 8, 4);
    if (length < HEADER_BYTES - LENGTH_BYTES || length > end - at - LENGTH_BYTES)
        return LEFT;
    batch->end = at + LENGTH_BYTES + length;
    batch->base = (int64_t)big_endian(at, 8);
    batch->epoch = (int32_t)big_endian(at + 12, 4);
    batch->attributes = (int)big_endian(at + 21, 2);
    int32_t last_delta = (int32_t)big_endian(at + 23, 4);
    batch->first_ms = (int64_t)big_endian(at + 27, 8);
    batch->max_ms = (int64_t)big_endian(at + 35, 8);
    batch->count = (int32_t)big_endian(at + 57, 4);
    batch->records = at + HEADER_BYTES;
    if (at[16] != MAGIC || batch->attributes & COMPRESSION || batch->base < 0 ||
        batch->epoch < 0 || last_delta < 0 || batch->count < 0 ||
        batch->base > INT64_MAX - last_delta - 1)
        return LEFT;
    batch->next = batch->base + last_delta + 1;
    return crc32c(at + CHECKED_FROM, batch->end) == (uint32_t)big_endian(at + 17, 4);
}

/* Check the records of a batch before the first of them becomes an object. */
static int check_records(const Batch *batch) {
    Reader in = {batch->records, batch->end};
    Record record;
    for (int32_t i = 0; i < batch->count; i++)
        if (!read_record(&in, batch, &record)) return LEFT;
    return in.at == in.end ? READ : LEFT;
}

/* --- entries --------------------------------------------------------------------------- */

/* Set an argument of the constructor; takes the reference to the value. */
static int set_argument(PyObject *arguments, const char *name, PyObject *value) {
    int result = value == NULL ? -1 : PyDict_SetItemString(arguments, name, value);
    Py_XDECREF(value);
    return result;
}

static int add_entries(const Batch *batch, PyObject *type, PyObject *entries) {
    PyObject *none = PyTuple_New(0), *arguments = PyDict_New();
    Reader in = {batch->records, batch->end};
    Record record;
    int result = FAILED;
    if (none == NULL || arguments == NULL ||
        set_argument(arguments, "leader_epoch", PyLong_FromLong(batch->epoch)) < 0 ||
        set_argument(arguments, "timestamp_type",
                     PyLong_FromLong(batch->attributes & APPENDED ? 1 : 0)) < 0)
        goto done;
    for (int32_t i = 0; i < batch->count; i++) {
        if (!read_record(&in, batch, &record)) break; /* checked before */
        if (set_argument(arguments, "offset", PyLong_FromLongLong(record.offset)) < 0 ||
            set_argument(arguments, "timestamp_ms",
                         PyLong_FromLongLong(record.time_ms)) < 0 ||
            set_argument(arguments, "value", new_part(&record.value)) < 0)
            goto done;
        PyObject *entry = PyObject_Call(type, none, arguments);
        int added = entry == NULL ? -1 : PyList_Append(entries, entry);
        Py_XDECREF(entry);
        if (added < 0) goto done;
    }
    result = READ;
done:
    Py_XDECREF(none);
    Py_XDECREF(arguments);
    return result;
}

PyObject *to_entries(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t start, count_max;
    PyObject *type, *entries = NULL, *made = NULL;
    long long next = -1;
    long epoch = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nOn:to_entries", &data, &start, &type, &count_max))
        return NULL;
    const unsigned char *begin = data.buf, *end = begin + data.len;
    const unsigned char *at = begin + (start < 0 || start > data.len ? data.len : start);
    int result = (entries = PyList_New(0)) == NULL ? FAILED : READ;
    while (result == READ && PyList_Size(entries) < count_max) {
        Batch batch;
        result = read_header(at, end, &batch);
        /* Control records are of Kafka alone; kafka-python skips them unread. */
        if (result == READ && !(batch.attributes & CONTROL)) {
            result = check_records(&batch);
            if (result == READ) result = add_entries(&batch, type, entries);
        }
        if (result != READ) break;
        at = batch.end;
        next = batch.next;
        epoch = batch.epoch;
    }
    if (result != FAILED)
        made = Py_BuildValue("OnLl", entries, (Py_ssize_t)(at - begin), next, epoch);
    Py_XDECREF(entries);
    PyBuffer_Release(&data);
    return made;
}
