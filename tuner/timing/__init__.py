"""Times blocks of steps of several arms, interleaved, on one device."""
