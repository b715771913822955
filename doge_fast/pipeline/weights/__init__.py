"""Domain weights as a product: looked at, compared, averaged, bounded, carried over, drawn."""
