"""Records one step: every launch, what it reads and writes, and which memory belongs to the step."""
