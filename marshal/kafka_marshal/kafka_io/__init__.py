"""Access to Kafka: the only package that imports a Kafka client library.

``settings``, ``topic_rules`` and ``transport`` load none. So settings can be checked,
as Spark's planners do, without the 0.3 s of processor time that loading kafka-python
takes.
"""

import warnings

# When the first module of kafka-python is imported, it reads its message schemas by
# functions of importlib that are deprecated in Python 3.11 and 3.12.
warnings.filterwarnings(
    "ignore",
    message="(read|open)_text is deprecated",
    category=DeprecationWarning,
    module=r"kafka\.protocol\.schemas\.load_json|importlib\.resources\._legacy",
)
