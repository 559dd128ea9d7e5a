"""One observer that hands events on to several."""

from kafka_marshal.ports import Event, Observer


class FanOut(Observer):
    """Hands each event to every observer added, in the order of adding.

    The clients of a process share one engine, and each may bring an observer.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def add(self, observer: Observer) -> None:
        """Hand events to one more observer."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Stop handing events to an observer; unknown ones are left alone."""
        kept = list(self._observers)
        if observer in kept:
            kept.remove(observer)
        self._observers = tuple(kept)

    def observe(self, event: Event) -> None:
        """Hand one event on; an observer that raises does not stop the others."""
        for observer in self._observers:
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001 - an observer is not ours
                self.remove(observer)
