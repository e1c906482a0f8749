"""What a crash costs, measured: processes of real runs are killed, and what was generated is compared with what was
trained.

``python -m bench.crash_cost`` runs and prints; `costs.py` says what is counted.
"""
