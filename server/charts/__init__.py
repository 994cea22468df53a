"""Charts as inline SVG, without JavaScript and style attributes, drawn from plain records.

A chart is a <div class="chart"> with two drawings, one for wide and one for narrow screens; static/charts.css shows the
one that fits, and sets the colours.
"""
