import pytest

from kafka_marshal.protocol.planner import KeyView, MemberView, Plan, View
from kafka_marshal.protocol.topic_policy import topic
from kafka_marshal.protocol.types import Key


def keys(name, row, *, me="a", start=0):
    """Return a topic: ``a`` mine, ``.`` free, ``b`` another's, ``!`` lost to it,
    ``+`` under way, ``-`` on its way out, ``^`` of an earlier life."""
    owners = {".": None, "!": "b", "+": None, "-": me, "^": me}
    return tuple(
        KeyView(
            Key("g", name, number),
            owners.get(mark, mark),
            is_mine=mark in {me, "+", "-"},
            is_claimable=mark in ".+",
            is_ours_before=mark == "^",
            is_leaving=mark == "-",
            is_lost=mark == "!",
        )
        for number, mark in enumerate(row, start)
    )


def view(*rows, members="ab", claims_max=0):
    names = frozenset(f"t{n}" for n in range(len(rows)))
    found = sum((keys(f"t{n}", row) for n, row in enumerate(rows)), ())
    return View("a", found, tuple(MemberView(m, names) for m in members), claims_max)


def parts(names):
    return [f"{key.topic[1:]}-{key.partition}" for key in names]


@pytest.mark.parametrize(
    ("rows", "claim", "release"),
    [
        pytest.param(["..."], ["0-0"], [], id="partition-0-first"),
        pytest.param(["+.."], [], [], id="until-it-is-won-nothing-else"),
        pytest.param(["a.."], ["0-1", "0-2"], [], id="then-the-rest"),
        pytest.param(["a.b"], ["0-1"], [], id="what-is-free-of-it"),
        pytest.param(["a+^"], ["0-2"], [], id="what-an-earlier-life-had"),
        pytest.param(["b.."], [], [], id="never-of-anothers-topic"),
        pytest.param(["baa"], [], ["0-1", "0-2"], id="losing-the-key-loses-all"),
        pytest.param(["aa!"], [], ["0-0", "0-1"], id="losing-a-part-loses-all"),
        pytest.param(["!a."], [], ["0-1"], id="and-so-does-the-key"),
        pytest.param(["..!"], [], [], id="nothing-again-before-all-is-given-up"),
        pytest.param(["-a."], [], ["0-1"], id="the-rest-follows-the-key"),
    ],
)
def test_one_topic(rows, claim, release):
    plan = topic(view(*rows, members="a"))
    assert parts(plan.claim) == claim
    assert parts(r.key for r in plan.release) == release
    assert {r.reason for r in plan.release} <= {"topic"}
    assert set(plan.why) >= set(plan.claim)


def test_topics_are_shared():
    free = ["...", "...", "...", "..."]
    assert len(topic(view(*free)).claim) == 2
    assert len(topic(view(*free, claims_max=1)).claim) == 1
    assert len(topic(view(*free, members="a")).claim) == 4


def test_a_limit_counts_topics():
    """Acceptance L04: 3 partitions of one topic are one."""
    held = view("aaa", "...", "...", members="a", claims_max=2)
    assert parts(topic(held).claim) == ["1-0"]
    assert topic(view("aaa", "aaa", "...", members="a", claims_max=2)) == Plan()


def test_a_surplus_topic_is_given_up_whole():
    plan = topic(view("aa", "aa"))
    assert [(parts([r.key])[0], r.successor) for r in plan.release] == [
        ("1-0", "b"),
        ("1-1", None),
    ]
    assert plan.release[0].detail == "t1 is another member's share"
    assert {r.reason for r in plan.release} == {"surplus"}


def test_the_reason_names_what_was_lost():
    (first, *_) = topic(view("aa!!", members="a")).release
    assert first.detail == "lost t0-2,3"
    (only,) = topic(view("ba")).release
    assert only.detail == "t0-0 is not held"
    (only,) = topic(view("-a", members="a")).release
    assert only.detail == "t0-0 is given up"


def test_without_partition_0_nothing_of_a_topic_is_taken():
    """It cannot be consumed from its position, so nobody holds the topic."""
    rest = keys("t0", "a.", start=1)
    plan = topic(View("a", rest, (MemberView("a", frozenset({"t0"})),)))
    assert parts(plan.claim) == []
    assert parts(r.key for r in plan.release) == ["0-1"]
