"""Columns that are read out of registered memory of another process, one-sided: ``--bytes nixl``."""
