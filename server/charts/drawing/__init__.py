"""What charts are made of: axes, marks, labels, SVG."""
