"""The update of an optimizer, as launches and as a graph."""
