"""The one event loop, and how threads and other loops wait for it. Knows no programs."""
