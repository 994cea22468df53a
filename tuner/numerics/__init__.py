"""Does a candidate still train the same model? The quick gate of every trial and the long one of a winner."""
