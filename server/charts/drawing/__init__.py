"""Building blocks of charts: axes, scales, marks, labels, text and SVG."""
