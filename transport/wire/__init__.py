"""Messages as bytes and back, and exactly-once delivery. Pure: no socket, thread, process or clock of its own."""
