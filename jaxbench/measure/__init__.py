"""What measures any workload: records, environment, worker processes, verdicts, costs, pages; it knows none of them."""
