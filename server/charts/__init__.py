"""Plain records in, drawings out: SVG text that a page holds as it is, without JavaScript and without style attributes.

A chart is a <div class="chart"> with two drawings, one for wide and one for narrow places; static/charts.css shows the
one that fits, and gives the colours.
"""
