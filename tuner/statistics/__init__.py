"""Raw times to intervals, verdicts and evidence. Pure: no clock, no device."""
