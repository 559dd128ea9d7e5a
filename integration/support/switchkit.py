"""Readers that switch between librdkafka and raw batches all the time."""

from kafka_marshal.kafka_io.fast import switching


def switch_always(monkeypatch):
    """Make readers switch as often as they can; return their types, in order."""
    made = []
    plain = switching.SwitchingReader._use

    def use(self, reader):
        is_done = plain(self, reader)
        if is_done:
            made.append(type(reader))
        return is_done

    monkeypatch.setattr(switching.SwitchingReader, "_use", use)
    monkeypatch.setattr(switching, "BACKLOG", 1)
    monkeypatch.setattr(switching, "FEW_POLLS", 3)
    monkeypatch.setattr(switching, "FEW_RECORDS", 10**9)
    monkeypatch.setattr(switching, "SMALL_BYTES", 10**6)
    for name in ("LOOK_S", "LOOK_EACH_S", "REST_S"):
        monkeypatch.setattr(switching, name, 0.0)
    return made
