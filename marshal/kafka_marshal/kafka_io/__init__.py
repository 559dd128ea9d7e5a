"""Where bytes meet Kafka: the only package that imports a Kafka client."""

import warnings
from importlib import import_module

# Type checkers take it for typing's own, whose import takes longer than all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .clients import AdminClient as AdminClient
    from .coordination import (
        KafkaCoordinationLog as KafkaCoordinationLog,
    )
    from .data import KafkaDataLog as KafkaDataLog
    from .settings import ConnectionConfig as ConnectionConfig
    from .topic_rules import ClusterInfo as ClusterInfo
    from .topic_rules import Problem as Problem
    from .topic_rules import TopicDescription as TopicDescription
    from .topic_rules import dangers as dangers
    from .topic_rules import (
        is_retention_finite as is_retention_finite,
    )
    from .topic_rules import problems as problems
    from .topic_rules import set_command as set_command
    from .topics import KafkaTopicAdmin as KafkaTopicAdmin
    from .transport import Choice as Choice
    from .transport import LogEndQuery as LogEndQuery
    from .transport import choose as choose
    from .transport import (
        open_coordination_log as open_coordination_log,
    )
    from .transport import open_data_log as open_data_log
    from .transport import open_offsets as open_offsets

# Names are imported when they are first used: settings can be checked, as Spark's
# planners do, without the 0.3 s of processor time that kafka-python takes to load.
_HOMES = {
    "AdminClient": "clients",
    "Choice": "transport",
    "ClusterInfo": "topic_rules",
    "ConnectionConfig": "settings",
    "KafkaCoordinationLog": "coordination",
    "KafkaDataLog": "data",
    "LogEndQuery": "transport",
    "KafkaTopicAdmin": "topics",
    "Problem": "topic_rules",
    "TopicDescription": "topic_rules",
    "choose": "transport",
    "dangers": "topic_rules",
    "is_retention_finite": "topic_rules",
    "open_coordination_log": "transport",
    "open_data_log": "transport",
    "open_offsets": "transport",
    "problems": "topic_rules",
    "set_command": "topic_rules",
}

# kafka-python reads its message schemas, in the import of whichever module of it comes
# first, by functions of importlib that Python 3.11 and 3.12 call deprecated.
warnings.filterwarnings(
    "ignore",
    message="(read|open)_text is deprecated",
    category=DeprecationWarning,
    module=r"kafka\.protocol\.schemas\.load_json|importlib\.resources\._legacy",
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
