"""What carries frames between gateway and engine; `port.py` says what a carrier is."""
