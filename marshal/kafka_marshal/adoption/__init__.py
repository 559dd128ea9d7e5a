"""Taking over a consumer group's positions, so that nobody starts anew.

``plan_adoption`` looks and writes nothing; ``adopt`` claims each partition, sets
its position by an ordinary beat and lets go. Both can be run again at any time.
"""

from .carry import adopt, plan_adoption
from .plan import Action, AdoptionPlan, Step

__all__ = ["Action", "AdoptionPlan", "Step", "adopt", "plan_adoption"]
