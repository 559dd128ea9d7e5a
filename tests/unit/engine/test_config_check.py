"""What is wrong with a coordination log whose partition 0 has no Config."""

import pytest
from logkit import Log, claim

from kafka_marshal.engine.config_check import agreed_config
from kafka_marshal.errors import TopicMisconfigured


@pytest.mark.parametrize(
    ("has_other_config", "advice"),
    [(True, "marshal topic format"), (False, "do not format it")],
)
def test_only_a_log_without_any_config_has_lost_it_for_good(has_other_config, advice):
    """Formatting gives partition 0 the Config of the others again (PROTOCOL 10.9)."""
    logs = Log(configured=False), Log(1, configured=has_other_config)
    logs[1].append(claim())
    worlds = {log.state.partition: log.state for log in logs}
    with pytest.raises(TopicMisconfigured, match=advice):
        agreed_config(worlds, cluster_id=None)
