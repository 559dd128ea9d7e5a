"""Public test kit: checks of policies and an embedded broker."""
