"""What was said, what a backend is asked and answers, what it cost. Plain data."""
