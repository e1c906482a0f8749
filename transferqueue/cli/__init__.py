"""The command line: `transferqueue demo | serve | top | inspect | doctor`."""
