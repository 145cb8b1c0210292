"""What `lorawgpu doctor` looks at: this system, every kernel against its reference, and tiny models end to end."""
