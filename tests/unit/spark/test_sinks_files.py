"""Chains of manifests that publish folders; each link is created once."""

import os
import shutil
import threading
from pathlib import Path

import attrs
import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark import sinks_files as module
from kafka_marshal.spark.sinks_files import CHAINS, Chain, FileSink, Link

OPTIONS = {
    "kafka.bootstrap.servers": "localhost:1",
    "subscribe": "t",
    "group": "g",
    "includeToken": "true",
}
T0 = TopicPartition("t", 0)
FIRST, SECOND = "1" * 32, "2" * 32


def link(first, end, folder, token="1.0.7", topic_id=FIRST):
    return Link(first=first, end=end, token=token, folder=folder, topic_id=topic_id)


class Fence:
    """Lets one token pass."""

    def __init__(self, token="1.0.7"):
        self.token = token

    def holds(self, topic, partition, *, token):
        return token == self.token


@pytest.fixture
def sink(tmp_path):
    return FileSink(tmp_path, Fence())


def aside(sink, first, end, token="1.0.7", topic_id=FIRST):
    folder = f"data/{token}-{first}-{end}-{topic_id}"
    (sink.path / folder).mkdir(parents=True)
    return link(first, end, folder, token, topic_id)


def publish(sink, link):
    return sink.publish(None, T0, link=link, batch_id=1)


def test_a_chain_refuses_a_second_link_at_the_same_offset(tmp_path):
    chain = Chain(tmp_path / "t" / "0")
    assert (chain.links(), chain.last()) == ([], None)
    first = link(0, 10, "data/x")
    assert chain.add(first)
    assert not chain.add(link(0, 12, "data/y"))
    assert chain.add(link(10, 20, "data/z"))
    assert [link.end for link in chain.links()] == [10, 20]
    assert chain.last().folder == "data/z"
    assert not [path for path in chain.folder.iterdir() if path.name[0] == "."]


class Listed:
    """Counts how often folders are listed."""

    def __init__(self, monkeypatch):
        self.count, glob = 0, Path.glob

        def counted(folder, pattern):
            self.count += 1
            return glob(folder, pattern)

        monkeypatch.setattr(Path, "glob", counted)


def test_links_are_listed_once_and_then_followed(tmp_path, monkeypatch):
    """Otherwise each batch would take longer than the one before."""
    chain, listed = Chain(tmp_path), Listed(monkeypatch)
    for number in range(5):
        assert chain.add(link(number, number + 1, f"data/{number}"))
        assert chain.last().end == number + 1
    assert chain.add(attrs.evolve(link(0, 3, "data/r"), generation=1))
    assert chain.add(attrs.evolve(link(3, 7, "data/s"), generation=1))
    assert chain.last().folder == "data/s", "also of a topic that was created again"
    assert listed.count == 1
    module._seen.clear()
    assert chain.last().folder == "data/s"


def test_the_last_links_of_only_a_few_chains_are_cached(tmp_path, monkeypatch):
    """A query may have a folder for each hour, with a chain for each partition."""
    module._seen.clear()
    monkeypatch.setattr(module, "SEEN_MAX", 3)
    chains = [Chain(tmp_path / str(number)) for number in range(10)]
    for number, chain in enumerate(chains):
        assert chain.add(link(0, 10 + number, "data/x"))
        assert chain.last().end == 10 + number
        assert chain.last().end == 10 + number
    assert len(module._seen) <= 3
    assert [chain.last().end for chain in chains] == list(range(10, 20))


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_chain_folder_that_was_removed_or_replaced_is_listed_again(tmp_path, how):
    chain = Chain(tmp_path / "t" / "0")
    assert chain.add(link(0, 10, "data/x"))
    assert chain.last().end == 10
    shutil.rmtree(chain.folder)
    if how == "removed":
        assert chain.last() is None
    else:
        assert chain.add(link(0, 3, "data/y"))
        assert chain.last().end == 3


def test_after_a_refused_link_the_folder_is_listed_again(tmp_path, monkeypatch):
    chain = Chain(tmp_path)
    assert chain.add(link(0, 10, "data/x"))
    assert chain.last().end == 10
    listed = Listed(monkeypatch)
    assert not chain.add(link(0, 12, "data/y"))
    assert chain.last().end == 10
    assert listed.count == 1


def test_a_link_whose_creation_the_server_repeated_is_published(sink, monkeypatch):
    """A server of NFS then answers that it exists."""
    create = os.link

    def create_twice(old, new):
        create(old, new)
        create(old, new)

    monkeypatch.setattr(os, "link", create_twice)
    made = aside(sink, 0, 10)
    assert publish(sink, made) == 0
    assert [each.folder for each in sink.links()[T0]] == [made.folder]
    assert (sink.path / made.folder).is_dir()
    assert publish(sink, aside(sink, 5, 10)) == 10


def test_only_one_of_many_writers_adds_a_link(tmp_path):
    chain = Chain(tmp_path)
    barrier = threading.Barrier(8)
    made = []

    def add(number):
        barrier.wait(timeout=30)
        if chain.add(link(0, 10, f"data/{number}")):
            made.append(number)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(made) == 1
    assert chain.last().folder == f"data/{made[0]}"


def test_publishing_adds_a_link_and_returns_its_first_offset(sink):
    assert publish(sink, aside(sink, 3, 10)) == 3
    assert publish(sink, aside(sink, 10, 15)) == 10
    # The first link begins at the start of all offsets: links have no gap.
    assert [(link.first, link.end) for link in sink.links()[T0]] == [(0, 10), (10, 15)]


def test_published_rows_are_not_published_twice(sink, caplog):
    publish(sink, aside(sink, 0, 10))
    again = aside(sink, 2, 10)
    assert not caplog.text
    assert publish(sink, again) == 10
    assert "rows_already_written t-0: all rows" in caplog.text
    assert not (sink.path / again.folder).exists()


def test_rows_of_a_topic_that_was_created_again_are_published(sink):
    publish(sink, aside(sink, 0, 10))
    sink = FileSink(sink.path, Fence("1.0.9"))
    assert publish(sink, aside(sink, 0, 5, "1.0.9", SECOND)) == 0
    assert publish(sink, aside(sink, 5, 7, "1.0.9", SECOND)) == 5
    again = aside(sink, 0, 7, "1.0.9", SECOND)
    assert publish(sink, again) == 7
    assert not (sink.path / again.folder).exists()
    sink = FileSink(sink.path, Fence("1.1.0"))
    assert publish(sink, aside(sink, 0, 3, "1.1.0", "3" * 32)) == 0
    links = sink.links()[T0]
    assert [(link.first, link.end) for link in links] == [
        (0, 10),
        (0, 5),
        (5, 7),
        (0, 3),
    ]
    assert [link.generation for link in links] == [0, 1, 1, 2]


@pytest.mark.parametrize(("known", "topic_id"), [("", FIRST), (FIRST, ""), ("", "")])
def test_an_unknown_topic_id_continues_the_chain(sink, known, topic_id):
    """Links of earlier versions have none."""
    publish(sink, aside(sink, 0, 10, topic_id=known))
    assert publish(sink, aside(sink, 10, 12, topic_id=topic_id)) == 10
    last = sink.links()[T0][-1]
    assert (last.first, last.end, last.topic_id) == (10, 12, known or topic_id)


def test_a_link_of_an_earlier_version_is_read(sink):
    folder = sink.path / CHAINS / "t" / "0"
    folder.mkdir(parents=True)
    text = '{"first": 0, "end": 10, "token": "1.0.3", "folder": "data/x"}'
    (folder / f"{0:020}.json").write_text(text)
    assert publish(sink, aside(sink, 10, 12)) == 10
    assert [link.end for link in sink.links()[T0]] == [10, 12]


def test_an_older_token_is_not_published(sink):
    publish(sink, aside(sink, 0, 10, "1.0.7"))
    sink = FileSink(sink.path, Fence("1.0.3"))
    old = aside(sink, 10, 20, "1.0.3")
    assert publish(sink, old) == 20
    assert not (sink.path / old.folder).exists()


def test_an_ended_claim_is_not_published(sink, caplog):
    gone = aside(sink, 0, 10, "1.0.9")
    assert publish(sink, gone) == 10
    assert sink.links() == {}
    assert "are dropped" in caplog.text


def test_the_second_writer_starts_at_the_end_of_the_first(sink, monkeypatch):
    late = aside(sink, 0, 15)
    add = Chain.add

    def after_another(chain, late):
        monkeypatch.setattr(Chain, "add", add)
        add(chain, link(0, 10, "data/other"))
        return add(chain, late)

    class Rest(FileSink):
        def _from(self, spark, link, first):
            assert first == 10
            return attrs.evolve(link, folder="data/rest")

    monkeypatch.setattr(Chain, "add", after_another)
    assert Rest(sink.path, sink.fence).publish(None, T0, link=late, batch_id=1) == 10
    links = sink.links()[T0]
    assert [(link.first, link.end, link.folder) for link in links] == [
        (0, 10, "data/other"),
        (10, 15, "data/rest"),
    ]


def test_a_chain_without_links_is_omitted(sink):
    (sink.path / CHAINS / "t" / "0").mkdir(parents=True)
    assert sink.links() == {}


def test_reading_before_the_first_write_returns_none(sink):
    assert sink.read(None) is None


def test_a_folder_of_rows_without_a_token_raises(sink):
    row = {"topic": "t", "partition": 0, "token": None, "topicId": FIRST, "first": 1}
    with pytest.raises(ConfigurationError, match=r"offset 1 of t-0.*no token"):
        sink._link(sink.path / "data" / "x", {**row, "last": 2})


@pytest.mark.parametrize("path", ["bills", "s3://bucket/bills", "hdfs://host/bills"])
def test_a_remote_path_raises(path):
    with pytest.raises(ConfigurationError, match="object stores"):
        FileSink.of(OPTIONS, path=path)


def test_a_sink_is_made_of_the_streams_options(tmp_path):
    assert FileSink.of(OPTIONS, path=f"file://{tmp_path}").path == tmp_path
    assert FileSink.of(OPTIONS, path=tmp_path).fence.group == "g"
