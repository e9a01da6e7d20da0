"""What the comparison shows: tables, page, picture."""
