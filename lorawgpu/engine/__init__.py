"""Plans recorded once per capacity and replayed: losses, gradients, optimizer steps."""
