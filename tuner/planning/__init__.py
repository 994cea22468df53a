"""What to try next and what a budget still holds. Pure: trials and seconds in, decisions out."""
