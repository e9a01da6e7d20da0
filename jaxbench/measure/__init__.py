"""Measurement tools independent of any workload: records, environment, worker processes, verdicts, costs, pages."""
