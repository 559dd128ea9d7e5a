"""Where bytes meet Kafka: the only package that imports a Kafka client.

``settings``, ``topic_rules`` and ``transport`` load none: settings can be checked, as
Spark's planners do, without the 0.3 s of processor time that kafka-python takes.
"""

import warnings

# kafka-python reads its message schemas, in the import of whichever module of it comes
# first, by functions of importlib that Python 3.11 and 3.12 call deprecated.
warnings.filterwarnings(
    "ignore",
    message="(read|open)_text is deprecated",
    category=DeprecationWarning,
    module=r"kafka\.protocol\.schemas\.load_json|importlib\.resources\._legacy",
)
