"""Plans a job's devices and a batch's engines, by one simulation of time: engines that generate, around the production
ledger or without it.
"""
