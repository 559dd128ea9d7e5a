"""Arguments of the asyncio API are checked where they are given."""

import pytest

from kafka_marshal import AsyncMarshal


@pytest.mark.parametrize(
    "given", [{"client_id": "c"}, {"group_id": "g", "client_id": "c", "group": "g"}]
)
def test_wrong_arguments_raise_type_error_at_the_call(given):
    """Not later, when the client is entered, far from the mistake."""
    with pytest.raises(TypeError, match="group"):
        AsyncMarshal(**given)
    marshal = AsyncMarshal(group_id="g", client_id="c")
    with pytest.raises(TypeError, match="topic"):
        marshal.consumer(topic="payments")  # type: ignore[call-arg]
