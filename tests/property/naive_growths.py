"""The naive twin's growths of data topics: PROTOCOL 9.10."""

from typing import Any

from naive_pauses import Ignored, Refused

ENDS_MAX = 65_536


class Growths:
    """Folds growths into ``growths``; a base of ``Naive``."""

    # Attributes of ``Naive``.
    t: Any
    growths: Any
    limit: Any
    elsewhere: Any

    def DataGrowth(self, entry, data, _key):  # noqa: N802 - 9.10
        if self.t != 0:
            raise Refused(self.elsewhere())
        topic, old, new = data["topic"], data["old_count"], data["new_count"]
        mine = {
            name[1]: row
            for name, row in self.growths.items()
            if name[0] == topic and not self.is_earlier(row, data)
        }
        known = mine.get(old)
        if old == new:
            if known is None:
                raise Refused("growth")
            self.put(topic, {n: row for n, row in mine.items() if n != old})
            return "growth_withdrawn", None
        if known is not None and known["new_count"] == new:
            if data["ends"] is None or known["ends"] is not None:
                raise Ignored("known")
            self.put(topic, mine | {old: known | {"ends": data["ends"]}})
            return "grown", None
        if data["ends"] is not None:
            raise Refused("growth")
        if [row for row in mine.values() if row["ends"] is None]:
            raise Refused("busy")
        if [row for row in mine.values() if old < row["new_count"]]:
            raise Refused("growth")
        row = {
            "topic": topic,
            "old_count": old,
            "new_count": new,
            "topic_id": data["topic_id"],
            "offset": entry["offset"],
            "ends": None,
        }
        others = [each for name, each in self.growths.items() if name[0] != topic]
        after = [*others, *mine.values(), row]
        ends = sum(each["old_count"] for each in after)
        if len(after) > self.limit("operations") or ends > ENDS_MAX:
            raise Refused("limits")
        self.put(topic, mine | {old: row})
        return "growing", None

    @staticmethod
    def is_earlier(row, data):
        ids = [row["topic_id"], data["topic_id"]]
        return None not in ids and ids[0] != ids[1]

    def put(self, topic, rows):
        others = {name: row for name, row in self.growths.items() if name[0] != topic}
        self.growths = others | {(topic, old): row for old, row in rows.items()}

    def growth_rows(self):
        return [self.growths[name] for name in sorted(self.growths)] or None
