"""The hallucination lab: is an answer supported by the context that it was given? (docs/hallucination.md)"""
