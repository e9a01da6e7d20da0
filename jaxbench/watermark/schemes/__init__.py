"""One file a scheme: its configuration, words, evidence and null distribution, in numpy; ../config.py has the table."""
