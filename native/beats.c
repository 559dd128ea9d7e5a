/* The loop of ``protocol/fold_beats.py`` (PROTOCOL 4.5) in C.
 *
 * It folds what that loop folds, or less: it stops at whatever is unusual, and the caller
 * leaves that entry to the full fold. Python is the rule; tests compare both.
 */

#include "records.h"

#include <string.h>

/* Python has the same values; a test fails if they differ. */
#define HEADER "\x01\x01\x00"
#define HEADER_BYTES 3
#define CHECKPOINT_TOPIC "/checkpoint"
#define ID_BYTES 16
#define TAGS_BYTES_MAX 1024
#define PARTITION_MAX INT64_C(0x7FFFFFFF)
#define LOG_APPEND_TIME 1

#define FIELDS_MIN 9 /* without tags */
#define SLOTS_FIRST 256

/* --- names of attributes, made once -------------------------------------------------- */

static PyObject *s_offset, *s_value, *s_timestamp_ms, *s_leader_epoch;
static PyObject *s_timestamp_type, *s_undecodable, *s_owner, *s_position;
static PyObject *s_heartbeat_interval_ms, *s_active_ms, *s_renewed_ms;
static PyObject *s_keys, *s_epochs, *s_dirty, *s_fences, *s_data, *s_places;

/* --- MessagePack: what a heartbeat consists of --------------------------------------- */

/* Read a non-negative integer in any of its forms; 0 if it is none. */
static int read_count(Reader *in, int64_t *found) {
    if (in->at >= in->end) return 0;
    unsigned char head = *in->at++;
    if (head < 0x80) {
        *found = head;
        return 1;
    }
    int size;
    switch (head) {
    case 0xcc: size = 1; break;
    case 0xcd: size = 2; break;
    case 0xce: size = 4; break;
    case 0xcf: size = 8; break;
    default: return 0;
    }
    if (in->end - in->at < size) return 0;
    uint64_t number = 0;
    for (int i = 0; i < size; i++) number = number << 8 | *in->at++;
    if (number > INT64_MAX) return 0;
    *found = (int64_t)number;
    return 1;
}

/* Read a string or, with ``bin``, bytes; 0 if it is neither or too long. */
static int read_bytes(Reader *in, int bin, const char **found, Py_ssize_t *size) {
    if (in->at >= in->end) return 0;
    unsigned char head = *in->at++;
    Py_ssize_t count;
    if (!bin && (head & 0xe0) == 0xa0) {
        count = head & 0x1f;
    } else if (head == (bin ? 0xc4 : 0xd9)) {
        if (in->end - in->at < 1) return 0;
        count = *in->at++;
    } else if (head == (bin ? 0xc5 : 0xda)) {
        if (in->end - in->at < 2) return 0;
        count = (Py_ssize_t)in->at[0] << 8 | in->at[1];
        in->at += 2;
    } else {
        return 0;
    }
    if (in->end - in->at < count) return 0;
    *found = (const char *)in->at;
    *size = count;
    in->at += count;
    return 1;
}

typedef struct {
    const char *client, *group, *incarnation, *topic;
    Py_ssize_t client_size, group_size, topic_size;
    int64_t partition, epoch, position; /* position is -1 for none */
} Beat;

/* Decode a heartbeat without a rewind; 0 for anything else. */
static int read_beat(Reader *in, Beat *beat) {
    const char *tags;
    Py_ssize_t size;
    int64_t seq;
    if (in->at >= in->end) return 0;
    int fields = *in->at++ - 0x90; /* a fixed array */
    if (fields != FIELDS_MIN && fields != FIELDS_MIN + 1) return 0;
    if (!read_bytes(in, 0, &beat->client, &beat->client_size)) return 0;
    if (!read_bytes(in, 0, &beat->group, &beat->group_size)) return 0;
    if (!read_bytes(in, 1, &beat->incarnation, &size) || size != ID_BYTES) return 0;
    if (!read_count(in, &seq)) return 0;
    if (!read_bytes(in, 0, &beat->topic, &beat->topic_size)) return 0;
    if (!read_count(in, &beat->partition) || beat->partition > PARTITION_MAX) return 0;
    if (!read_count(in, &beat->epoch)) return 0;
    if (in->at < in->end && *in->at == 0xc0) {
        in->at++;
        beat->position = -1;
    } else if (!read_count(in, &beat->position)) {
        return 0;
    }
    if (in->at >= in->end || *in->at++ != 0xc2) return 0; /* rewind is false */
    if (fields > FIELDS_MIN &&
        (!read_bytes(in, 1, &tags, &size) || size > TAGS_BYTES_MAX))
        return 0;
    return in->at == in->end;
}

/* --- keys that the run has met ----------------------------------------------------- */

typedef struct {
    int64_t epoch; /* -1 for an empty slot */
    PyObject *key, *known;
    PyObject *owner; /* keeps the texts below alive, with ``key`` */
    const char *client, *group, *incarnation, *topic;
    Py_ssize_t client_size, group_size, topic_size;
    int64_t partition, position, before, now_ms;
    int is_touched;
} Slot;

typedef struct {
    Slot *slots;
    size_t size, used; /* size is a power of two */
} Table;

static Slot *find_slot(Table *table, int64_t epoch) {
    size_t mask = table->size - 1;
    size_t at = ((uint64_t)epoch * UINT64_C(0x9E3779B97F4A7C15) >> 20) & mask;
    while (table->slots[at].epoch != -1 && table->slots[at].epoch != epoch)
        at = (at + 1) & mask;
    return &table->slots[at];
}

static int init_table(Table *table, size_t size) {
    table->slots = PyMem_Malloc(size * sizeof(Slot));
    if (table->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < size; i++) table->slots[i].epoch = -1;
    table->size = size;
    table->used = 0;
    return 0;
}

static int grow_table(Table *table) {
    Table larger;
    if (init_table(&larger, table->size * 4) < 0) return -1;
    for (size_t i = 0; i < table->size; i++)
        if (table->slots[i].epoch != -1)
            *find_slot(&larger, table->slots[i].epoch) = table->slots[i];
    larger.used = table->used;
    PyMem_Free(table->slots);
    *table = larger;
    return 0;
}

/* Set an attribute to a number; the object takes no part in garbage collection. */
static int set_number(PyObject *of, PyObject *name, int64_t number) {
    PyObject *value = PyLong_FromLongLong(number);
    if (value == NULL) return -1;
    int result = PyObject_SetAttr(of, name, value);
    Py_DECREF(value);
    return result;
}

/* If ``result`` is 0, write what was folded into the states of the keys. Free the table.
 * Return ``result``, or -1 on an error. */
static int end_table(Table *table, int result) {
    for (size_t i = 0; i < table->size; i++) {
        Slot *slot = &table->slots[i];
        if (slot->epoch == -1) continue;
        if (slot->is_touched && result == 0) {
            PyObject *now = PyLong_FromLongLong(slot->now_ms);
            if (now == NULL ||
                PyObject_SetAttr(slot->known, s_active_ms, now) < 0 ||
                PyObject_SetAttr(slot->known, s_renewed_ms, now) < 0 ||
                (slot->position != slot->before &&
                 set_number(slot->known, s_position, slot->position) < 0))
                result = -1;
            Py_XDECREF(now);
        }
        Py_DECREF(slot->key);
        Py_DECREF(slot->known);
        Py_DECREF(slot->owner);
    }
    PyMem_Free(table->slots);
    return result;
}

/* --- attributes ---------------------------------------------------------------------- */

/* Read a number; 0 if it is none or too large, without an error. */
static int to_number(PyObject *value, int64_t *found) {
    if (value == NULL) {
        PyErr_Clear();
        return 0;
    }
    long long number = PyLong_Check(value) ? PyLong_AsLongLong(value) : -1;
    int is_number = PyLong_Check(value) && !(number == -1 && PyErr_Occurred());
    PyErr_Clear();
    *found = number;
    return is_number;
}

static int number_of(PyObject *of, PyObject *name, int64_t *found) {
    PyObject *value = PyObject_GetAttr(of, name);
    int result = to_number(value, found);
    Py_XDECREF(value);
    return result;
}

static int text_at(PyObject *tuple, Py_ssize_t at, const char **found,
                   Py_ssize_t *size) {
    PyObject *value = PyTuple_GetItem(tuple, at); /* borrowed */
    if (value != NULL && PyUnicode_Check(value))
        *found = PyUnicode_AsUTF8AndSize(value, size);
    else
        *found = NULL;
    PyErr_Clear();
    return *found != NULL;
}

static int same(const char *a, Py_ssize_t a_size, const char *b, Py_ssize_t b_size) {
    return a_size == b_size && memcmp(a, b, (size_t)a_size) == 0;
}

typedef struct {
    PyObject *keys, *epochs, *fences, *dirty; /* attributes of the state */
    PyObject *beats;                          /* what was folded; NULL: not wanted */
    int64_t interval_ms, excluded_epoch, leader_epoch, latest_ms;
    Py_ssize_t fences_count;
} Rules;

/* Return whether the owner of a slot's key is fenced; -1 on an error. */
static int is_fenced(const Rules *rules, const Slot *slot) {
    if (!rules->fences_count) return 0;
    PyObject *name = PyTuple_Pack(3, PyTuple_GetItem(slot->key, 0),
                                  PyTuple_GetItem(slot->owner, 0),
                                  PyTuple_GetItem(slot->owner, 1));
    if (name == NULL) return -1;
    int result = PySequence_Contains(rules->fences, name);
    Py_DECREF(name);
    return result;
}

/* Fill a slot with the key of this epoch, if heartbeats of its owner are ordinary.
 * Return 1 if they are, 0 if not, -1 on an error. */
static int fill_slot(Slot *slot, const Rules *rules, int64_t epoch) {
    if (epoch == rules->excluded_epoch) return 0;
    PyObject *number = PyLong_FromLongLong(epoch);
    if (number == NULL) return -1;
    PyObject *key = PyDict_GetItemWithError(rules->epochs, number); /* borrowed */
    Py_DECREF(number);
    if (key == NULL || !PyTuple_Check(key) || PyTuple_Size(key) != 3)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *known = PyDict_GetItemWithError(rules->keys, key); /* borrowed */
    if (known == NULL) return PyErr_Occurred() ? -1 : 0;
    PyObject *owner = PyObject_GetAttr(known, s_owner);
    if (owner == NULL) return -1;
    int64_t interval_ms;
    Py_ssize_t incarnation_size = 0;
    char *incarnation = NULL;
    int is_one =
        PyTuple_Check(owner) && PyTuple_Size(owner) == 2 &&
        number_of(known, s_heartbeat_interval_ms, &interval_ms) &&
        interval_ms == rules->interval_ms &&
        text_at(key, 0, &slot->group, &slot->group_size) &&
        text_at(key, 1, &slot->topic, &slot->topic_size) &&
        !same(slot->topic, slot->topic_size, CHECKPOINT_TOPIC,
              sizeof CHECKPOINT_TOPIC - 1) &&
        to_number(PyTuple_GetItem(key, 2), &slot->partition) &&
        text_at(owner, 0, &slot->client, &slot->client_size) &&
        PyBytes_Check(PyTuple_GetItem(owner, 1)) &&
        PyBytes_AsStringAndSize(PyTuple_GetItem(owner, 1), &incarnation,
                                &incarnation_size) == 0 &&
        incarnation_size == ID_BYTES;
    PyObject *position = is_one ? PyObject_GetAttr(known, s_position) : NULL;
    if (is_one && position == Py_None)
        slot->position = -1;
    else if (is_one && !to_number(position, &slot->position))
        is_one = 0;
    Py_XDECREF(position);
    slot->owner = owner;
    slot->key = key;
    if (is_one) {
        int fenced = is_fenced(rules, slot);
        if (fenced) is_one = fenced < 0 ? -1 : 0;
    }
    if (is_one != 1) {
        Py_DECREF(owner);
        return is_one;
    }
    slot->incarnation = incarnation;
    Py_INCREF(key);
    Py_INCREF(known);
    slot->known = known;
    slot->before = slot->position;
    slot->is_touched = 0;
    slot->epoch = epoch;
    return 1;
}

static int is_of(const Beat *beat, const Slot *slot) {
    return beat->partition == slot->partition &&
           memcmp(beat->incarnation, slot->incarnation, ID_BYTES) == 0 &&
           same(beat->client, beat->client_size, slot->client, slot->client_size) &&
           same(beat->topic, beat->topic_size, slot->topic, slot->topic_size) &&
           same(beat->group, beat->group_size, slot->group, slot->group_size);
}

/* --- the loop -------------------------------------------------------------------------- */

typedef struct {
    int64_t next_offset, now_ms, before_ms;
} Clock;

/* An entry of the log, from an object or from a fetch. */
typedef struct {
    int64_t offset, at_ms;
    const unsigned char *value;
    Py_ssize_t size;
} Entry;

/* Add a folded heartbeat, if that is wanted; -1 on an error. */
static int note_beat(const Rules *rules, const Entry *entry, const Clock *clock,
                     const Slot *slot) {
    if (rules->beats == NULL) return 0;
    PyObject *position = slot->position < 0 ? Py_NewRef(Py_None)
                                            : PyLong_FromLongLong(slot->position);
    PyObject *beat =
        position == NULL
            ? NULL
            : Py_BuildValue("LLLLN", (long long)entry->offset, (long long)entry->at_ms,
                            (long long)slot->epoch, (long long)clock->now_ms, position);
    int result = beat == NULL ? -1 : PyList_Append(rules->beats, beat);
    Py_XDECREF(beat);
    return result;
}

/* Fold one entry; return 1 if it was folded, 0 if it is left to the full fold, -1 on an
 * error. */
static int fold_one(const Entry *entry, Clock *clock, Table *table,
                    const Rules *rules) {
    Beat beat;
    if (entry->offset < clock->next_offset || entry->offset == INT64_MAX ||
        entry->at_ms < 0 || entry->size < HEADER_BYTES ||
        memcmp(entry->value, HEADER, HEADER_BYTES) != 0)
        return 0;
    Reader in = {entry->value + HEADER_BYTES, entry->value + entry->size};
    if (!read_beat(&in, &beat)) return 0;
    /* Made for the first heartbeat: most runs of other entries have none. */
    if (table->slots == NULL && init_table(table, SLOTS_FIRST) < 0) return -1;
    Slot *slot = find_slot(table, beat.epoch);
    if (slot->epoch == -1) {
        int filled = fill_slot(slot, rules, beat.epoch);
        if (filled != 1) return filled;
        if (++table->used * 2 > table->size) {
            if (grow_table(table) < 0) return -1;
            slot = find_slot(table, beat.epoch);
        }
    }
    if (!is_of(&beat, slot)) return 0;
    if (entry->at_ms > clock->before_ms) {
        /* No difference overflows, because no number is negative. */
        int64_t moved_ms = entry->at_ms - clock->before_ms;
        if (moved_ms > rules->latest_ms - clock->now_ms) return 0;
        clock->now_ms += moved_ms;
        clock->before_ms = entry->at_ms;
    }
    if (!slot->is_touched) {
        if (PyDict_SetItem(rules->dirty, slot->key, Py_None) < 0) return -1;
        slot->is_touched = 1;
    }
    clock->next_offset = entry->offset + 1;
    if (beat.position > slot->position) slot->position = beat.position;
    slot->now_ms = clock->now_ms;
    return note_beat(rules, entry, clock, slot) < 0 ? -1 : 1;
}

/* Fold a LogEntry, with the results of ``fold_one``. */
static int fold_object(PyObject *object, Clock *clock, Table *table,
                       const Rules *rules) {
    int64_t epoch, kind;
    Entry entry;
    char *bytes;
    PyObject *undecodable = PyObject_GetAttr(object, s_undecodable);
    if (undecodable == NULL) return -1;
    Py_DECREF(undecodable);
    if (undecodable != Py_None || !number_of(object, s_leader_epoch, &epoch) ||
        epoch != rules->leader_epoch || !number_of(object, s_timestamp_type, &kind) ||
        kind != LOG_APPEND_TIME || !number_of(object, s_offset, &entry.offset) ||
        !number_of(object, s_timestamp_ms, &entry.at_ms))
        return 0;
    PyObject *value = PyObject_GetAttr(object, s_value);
    if (value == NULL) return -1;
    int result = 0;
    if (PyBytes_Check(value)) {
        result = PyBytes_AsStringAndSize(value, &bytes, &entry.size);
        entry.value = (unsigned char *)bytes;
        if (result == 0) result = fold_one(&entry, clock, table, rules);
    }
    Py_DECREF(value);
    return result;
}

/* Fold an entry of a fetch, with the results of ``fold_one``. */
static int fold_place(const Fetch *fetch, Py_ssize_t at, Batch *batch, Clock *clock,
                      Table *table, const Rules *rules) {
    Record record;
    if (!read_place(fetch, at, batch, &record) ||
        batch->epoch != rules->leader_epoch || !(batch->attributes & APPENDED))
        return 0;
    Entry entry = {record.offset, record.time_ms, record.value.at,
                   (Py_ssize_t)record.value.size};
    return fold_one(&entry, clock, table, rules);
}

static int fold_objects(PyObject *entries, Py_ssize_t *at, Clock *clock, Table *table,
                        const Rules *rules) {
    Py_ssize_t count = PySequence_Size(entries);
    int result = count < 0 ? -1 : 1;
    while (result == 1 && *at < count) {
        PyObject *entry = PySequence_GetItem(entries, *at);
        result = entry == NULL ? -1 : fold_object(entry, clock, table, rules);
        Py_XDECREF(entry);
        if (result == 1) ++*at;
    }
    return result;
}

static int fold_places(PyObject *entries, Py_ssize_t *at, Clock *clock, Table *table,
                       const Rules *rules) {
    Fetch fetch;
    Batch batch = {0};
    int result = -1;
    PyObject *data = PyObject_GetAttr(entries, s_data);
    PyObject *places = PyObject_GetAttr(entries, s_places);
    if (data != NULL && places != NULL && get_fetch(data, places, &fetch) == 0) {
        result = *at < 0 ? 0 : 1;
        while (result == 1 && *at < fetch.count) {
            result = fold_place(&fetch, *at, &batch, clock, table, rules);
            if (result == 1) ++*at;
        }
        PyBuffer_Release(&fetch.data);
    }
    Py_XDECREF(data);
    Py_XDECREF(places);
    return result;
}

typedef int (*Loop)(PyObject *entries, Py_ssize_t *at, Clock *clock, Table *table,
                    const Rules *rules);

static int fold_all(Loop loop, PyObject *entries, Py_ssize_t *at, Clock *clock,
                    const Rules *rules) {
    Table table = {0};
    int result = loop(entries, at, clock, &table, rules);
    /* An error leaves the keys as they were. */
    return end_table(&table, result < 0 ? -1 : 0);
}

/* Read the numbers of the state and the caller; 0 if the run is left to the full fold,
 * because one of them is missing, negative or too large. */
static int read_state(PyObject *state, PyObject *moved[3], PyObject *latest_ms,
                      Clock *clock, Rules *rules) {
    return to_number(moved[0], &clock->next_offset) &&
           to_number(moved[1], &clock->now_ms) &&
           to_number(moved[2], &clock->before_ms) &&
           to_number(latest_ms, &rules->latest_ms) &&
           number_of(state, s_leader_epoch, &rules->leader_epoch) &&
           clock->next_offset >= 0 && clock->now_ms >= 0 && clock->before_ms >= 0 &&
           rules->latest_ms >= clock->now_ms;
}

static PyObject *fold(Loop loop, PyObject *args, PyObject *named) {
    static char *names[] = {"",
                            "",
                            "clock",
                            "start",
                            "except_epoch",
                            "beats",
                            "interval_ms",
                            "latest_ms",
                            NULL};
    PyObject *state, *entries, *moved[3], *beats, *latest_ms;
    long long excluded_epoch, interval_ms;
    Py_ssize_t at;
    Clock clock;
    Rules rules = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, named, "OO$(OOO)nLOLO:fold", names, &state, &entries, &moved[0],
            &moved[1], &moved[2], &at, &excluded_epoch, &beats, &interval_ms,
            &latest_ms))
        return NULL;
    if (!read_state(state, moved, latest_ms, &clock, &rules))
        return Py_BuildValue("n(OOO)", at, moved[0], moved[1], moved[2]);
    rules.excluded_epoch = excluded_epoch;
    rules.interval_ms = interval_ms;
    rules.beats = beats == Py_None ? NULL : beats;
    rules.keys = PyObject_GetAttr(state, s_keys);
    rules.epochs = PyObject_GetAttr(state, s_epochs);
    rules.dirty = PyObject_GetAttr(state, s_dirty);
    rules.fences = PyObject_GetAttr(state, s_fences);
    int result = -1;
    if (rules.keys && rules.epochs && rules.dirty && rules.fences) {
        rules.fences_count = PyObject_Size(rules.fences);
        if (rules.fences_count >= 0)
            result = fold_all(loop, entries, &at, &clock, &rules);
    }
    Py_XDECREF(rules.keys);
    Py_XDECREF(rules.epochs);
    Py_XDECREF(rules.dirty);
    Py_XDECREF(rules.fences);
    if (result < 0) return NULL;
    return Py_BuildValue("n(LLL)", at, (long long)clock.next_offset,
                         (long long)clock.now_ms, (long long)clock.before_ms);
}

PyObject *fold_beats(PyObject *module, PyObject *args, PyObject *named) {
    (void)module;
    return fold(fold_objects, args, named);
}

PyObject *fold_packed(PyObject *module, PyObject *args, PyObject *named) {
    (void)module;
    return fold(fold_places, args, named);
}

int init_beats(void) {
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&s_offset, "offset"},
        {&s_value, "value"},
        {&s_timestamp_ms, "timestamp_ms"},
        {&s_leader_epoch, "leader_epoch"},
        {&s_timestamp_type, "timestamp_type"},
        {&s_undecodable, "undecodable"},
        {&s_owner, "owner"},
        {&s_position, "position"},
        {&s_heartbeat_interval_ms, "heartbeat_interval_ms"},
        {&s_active_ms, "active_ms"},
        {&s_renewed_ms, "renewed_ms"},
        {&s_keys, "keys"},
        {&s_epochs, "epochs"},
        {&s_dirty, "dirty"},
        {&s_fences, "fences"},
        {&s_data, "data"},
        {&s_places, "places"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        Py_XDECREF(*names[i].name);
        *names[i].name = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name == NULL) return -1;
    }
    return 0;
}
