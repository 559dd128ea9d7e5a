"""What admins do: formats, pauses, set positions, drains, changes of a layout."""
