"""What a page shows, from records: plain data for the templates."""
