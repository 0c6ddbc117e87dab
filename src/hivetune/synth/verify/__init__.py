"""What a made row must stand before it is kept."""
