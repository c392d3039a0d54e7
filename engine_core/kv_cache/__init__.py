"""Which request holds which KV block, on the device and on the host. Knows numbers and hashes, no tensor."""
