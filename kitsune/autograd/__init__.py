"""What the engine reads and changes of an autograd graph: leaves, outputs, hooks, the thread of a backward."""
