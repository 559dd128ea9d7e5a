"""Clients to export, and the figures of a scrape."""

from prometheus_client.parser import text_string_to_metric_families


class Client:
    """The part of a ``Marshal`` that a collector uses, over a node in memory."""

    def __init__(self, node, session=None):
        self.engine = node.engine
        self.session = session or node.session
        self.group_id = self.session.claimant.group_id
        self.client_id = self.session.claimant.owner.client_id
        self.coordination_topic = "__marshal"
        self.is_closed = False
        self.closers = []

    def call_on_close(self, function):
        self.closers.append(function)

    def close(self):
        self.is_closed = True
        for function in self.closers:
            function()


class Scraped:
    """The figures of one exposition; no name occurs twice with the same labels."""

    def __init__(self, text):
        self.figures = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                place = (sample.name, tuple(sorted(sample.labels.items())))
                assert place not in self.figures, place
                self.figures[place] = sample.value

    def __call__(self, name, labels=None, **more):
        wanted = dict(labels or {}) | more
        return self.figures.get((name, tuple(sorted(wanted.items()))))

    def named(self, name):
        return {
            tuple(value for _, value in labels): figure
            for (found, labels), figure in self.figures.items()
            if found == name
        }
