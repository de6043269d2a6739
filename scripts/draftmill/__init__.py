"""What the stage scripts share, one small module per concept."""
