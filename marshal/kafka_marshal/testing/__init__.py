"""Public test kit: fakes, virtual clock, conformance kit and embedded broker."""
