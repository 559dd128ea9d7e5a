"""Public test kit: fakes, virtual clock, checks of policies and embedded broker."""
