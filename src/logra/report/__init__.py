"""The report of one or several runs: a single HTML file that opens offline.

run        what lies in the folder of a run
groups     runs that differ in their seed alone, and what tells the others apart
series     means and bands over seeds
panels     which curves are drawn, of which metrics, in which unit
figure     SVG drawings with matplotlib, coloured by the page's style sheet
memory     memory by category and phase
tables     comparison, events, completions, settings
page       the file

`matplotlib` (the extra `report`) is imported when the first figure is drawn.
"""

from logra.report.page import write_report

__all__ = ["write_report"]
