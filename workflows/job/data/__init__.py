"""From a data file to token ids: readers of data files, prompts, tokenizers, and the source of prompts. No torch
here."""
