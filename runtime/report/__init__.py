"""Reports of benchmarks: one page that needs nothing else, or one figure, drawn from the results that study.py gives.

Drawing needs matplotlib (the extra `report`), which is imported when something is drawn. Measures nothing.
"""

from __future__ import annotations

from .charts import check_drawing, figure
from .page import page

__all__ = ["check_drawing", "figure", "page"]
