"""One file per scheme: configuration, words, evidence and null distribution, in numpy; ../config.py has the table."""
