"""The records of this folder: launches, what each touches, what a step changes."""
