"""One operation at a time: ledger, codec, storage. `make bench-micro`; never collected by `make test`."""
