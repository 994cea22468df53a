"""Which stream issues which launch, and the memory that this takes. Pure: no device, no torch."""
