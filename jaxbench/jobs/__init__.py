"""Bulk jobs in a queue that survives its workers: commands of experiments/, run one after another."""
