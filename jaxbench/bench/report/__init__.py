"""Report of the comparison: tables, page, picture."""
