"""The reward of a row as a weighted sum of terms: functions in TRL's form, and reward models."""
