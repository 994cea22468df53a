"""Statistics of raw step times: intervals, verdicts and evidence. Pure functions without clock or device."""
