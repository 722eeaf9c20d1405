"""What several tests share: leak checks, loop checks, patterns, and scripted child processes."""
