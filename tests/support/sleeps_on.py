"""A program that does not end by itself."""

import time

if __name__ == "__main__":
    time.sleep(600)
