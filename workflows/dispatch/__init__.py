"""Dispatch by expected length (StreamRL, arXiv 2504.15930, section 5): rank prompts, measure engines, plan classes
(docs/decisions/planning.md).
"""
