"""The hallucination lab: does an answer rest on the context that it was given? (docs/hallucination.md)"""
