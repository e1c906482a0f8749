"""The browser of rows on the page: recorded rows by filters, groups beside each other, one row whole."""
