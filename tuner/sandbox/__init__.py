"""What a measuring process is denied."""
