"""What a prefill and a decode worker do with requests."""
