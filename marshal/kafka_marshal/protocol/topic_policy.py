"""The policy ``topic``: whole topics, with partition 0 as the key (PROTOCOL 1.6).

Who holds partition 0 of a topic takes all the others, as they become free; nobody
else takes any of them. Who loses one partition gives the whole topic up, because a
topic in two hands is what nobody asked for. Limits count topics.
"""

import attrs

from kafka_marshal.protocol.planner import KeyView, Plan, Release, View, fair

LEAD = 0


def topic(view: View) -> Plan:
    """Hold an equal share of whole topics, decided by each topic's partition 0."""
    topics: dict[str, list[KeyView]] = {}
    for key in view.keys:
        topics.setdefault(key.key.topic, []).append(key)
    torn = {name for name, keys in topics.items() if any(key.is_lost for key in keys)}
    leads = tuple(
        keys[0]
        for name, keys in topics.items()
        if keys[0].key.partition == LEAD and name not in torn
    )
    plan = fair(attrs.evolve(view, keys=leads))
    given = {release.key.topic: release for release in plan.release}
    claim = list(plan.claim)
    release: list[Release] = []
    why = {key: f"topic, {text}" for key, text in plan.why.items()}
    for name, keys in topics.items():
        reason = _why_not(view, keys, is_given=name in given)
        if reason is None:
            parts = [key.key for key in keys if _is_open(key)]
            claim.extend(parts)
            why.update(dict.fromkeys(parts, f"topic: {name}-{LEAD} is held"))
            continue
        for key in keys:
            if key.is_mine and key.owner == view.me and not key.is_leaving:
                # The lead finds its next owner; the rest follows whoever it is.
                is_lead = key.key.partition == LEAD and name in given
                successor = given[name].successor if is_lead else None
                name_of = "surplus" if name in given else "topic"
                release.append(Release(key.key, successor, name_of, reason))
    return Plan(tuple(claim), tuple(release), why)


def _is_open(key: KeyView) -> bool:
    return not key.is_mine and (key.is_claimable or key.is_ours_before)


def _why_not(view: View, keys: list[KeyView], *, is_given: bool) -> str | None:
    """Return why nothing of a topic is to be held now, None where it is ours."""
    lead = keys[0]
    name = lead.key.topic
    lost = [str(key.key.partition) for key in keys if key.is_lost]
    if lost:
        return f"lost {name}-{','.join(lost)}"
    if is_given:
        return f"{name} is another member's share"
    if lead.key.partition == LEAD and lead.is_mine:
        if lead.is_leaving:
            return f"{name}-{LEAD} is given up"
        if lead.owner == view.me:
            return None
    return f"{name}-{LEAD} is not held"
