"""What `llama-sidecar chat` is made of: reading lines, showing answers, the commands that begin with a slash."""
